"""Made-up checkpoints: any size, random weights, written as a stream. For measuring memory and speed."""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from pagelet.models.config import spec_from_config
from pagelet.models.weight_shapes import source_name, weight_shapes

# "1b": the shape of a 1B Llama 3.2: 16 layers, 32 heads on 8 KV heads, a tied table of 128,256 tokens.
SHAPES: dict[str, dict[str, object]] = {
    "1b": {
        "vocab_size": 128_256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 8192,
        "rope_theta": 5e5, "tie_word_embeddings": True,
    },
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"], "vocab_size": 151_936, "hidden_size": 1024,
        "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40_960, "rope_theta": 1e6,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
    },
    "100m": {
        "vocab_size": 32_000, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12,
        "num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 4096,
        "rope_theta": 1e4, "tie_word_embeddings": True,
    },
}  # fmt: skip
_LLAMA = {"architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "rms_norm_eps": 1e-5}
_PIECE = 1 << 22


def write_checkpoint(folder: Path, shape: Mapping[str, object], seed: int = 0) -> None:
    """A folder in bf16, of a shape as in SHAPES (a Llama's by default): deviation 0.02, norms of one."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**_LLAMA, **shape}
    spec = spec_from_config(config)
    (folder / "config.json").write_text(json.dumps(config))
    _write_tokenizer(folder / "tokenizer.json")
    names = {source_name(role, spec.row.names): shape for role, shape in weight_shapes(spec)}
    generator = np.random.default_rng(seed)
    with (folder / "model.safetensors").open("wb") as file:
        header = json.dumps(_header(names)).encode()
        file.write(len(header).to_bytes(8, "little") + header)
        for name, size in names.items():
            for piece in _values(name, size, generator):
                file.write(piece.astype(ml_dtypes.bfloat16).tobytes())


def _header(names: dict[str, tuple[int, ...]]) -> dict[str, object]:
    entries: dict[str, object] = {}
    offset = 0
    for name, shape in names.items():
        end = offset + 2 * int(np.prod(shape))
        entries[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    return entries


def _values(
    name: str, shape: tuple[int, ...], generator: np.random.Generator
) -> Iterator[NDArray[np.float32]]:
    count = int(np.prod(shape))
    for start in range(0, count, _PIECE):
        size = min(_PIECE, count - start)
        is_norm = len(shape) == 1
        yield (
            np.ones(size, np.float32)
            if is_norm
            else generator.standard_normal(size, np.float32) * np.float32(0.02)
        )


def _write_tokenizer(path: Path) -> None:
    """Bytes as tokens: enough to open the bundle."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    write_checkpoint(args.folder, SHAPES[args.shape])
    return 0


if __name__ == "__main__":
    sys.exit(main())
