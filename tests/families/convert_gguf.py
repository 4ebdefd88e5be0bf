"""Runs llama.cpp's converter: convert_gguf.py HOME FOLDER FILE [FOLDER FILE ...]; HOME is llama.cpp's folder.

As its own program it knows tokenizers by their checksums, and so refuses one that was made for a test.
"""

import json
import sys
from pathlib import Path


def main(home: str, *paths: str) -> None:
    sys.path[:0] = [home, str(Path(home) / "gguf-py")]
    import gguf
    import torch
    from conversion import ModelType, get_model_architecture, get_model_class
    from conversion.base import TextModel

    setattr(TextModel, "get_vocab_base_pre", lambda model, tokenizer: "gpt-2")  # noqa: B010
    for folder, out in zip(paths[::2], paths[1::2], strict=True):
        # As it is: read through transformers, it would lose what older ones wrote.
        config = json.loads((Path(folder) / "config.json").read_text())
        kind = get_model_class(get_model_architecture(config, ModelType.TEXT))
        with torch.inference_mode():
            model = kind(Path(folder), gguf.LlamaFileType.ALL_F32, Path(out), hparams=config)
            for one in (kind, type(getattr(model, "impl", model))):
                one.set_vocab = TextModel._set_vocab_gpt2
            model.write()


if __name__ == "__main__":
    main(*sys.argv[1:])
