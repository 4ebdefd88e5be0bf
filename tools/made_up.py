"""Made-up checkpoints: any size, random weights, written as a stream. For measuring memory and speed."""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from pagelet.models.rope import RopeSpec
from pagelet.models.spec import ModelSpec, source_name

# The shape of a 1B Llama 3.2: 16 layers, 32 heads on 8 KV heads, a tied table of 128,256 tokens.
SHAPES = {
    "1b": ModelSpec(
        "llama", 128_256, 2048, 8192, 16, 32, 8, 64, 8192, 1e-5, RopeSpec(5e5, 64), tie_embeddings=True
    ),
    "100m": ModelSpec(
        "llama", 32_000, 768, 2048, 12, 12, 4, 64, 4096, 1e-5, RopeSpec(1e4, 64), tie_embeddings=True
    ),
}
_PIECE = 1 << 22


def write_checkpoint(folder: Path, spec: ModelSpec, seed: int = 0) -> None:
    """A Hugging Face folder of `spec` in bf16: weights of deviation 0.02, norms of one."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_config(spec)))
    _write_tokenizer(folder / "tokenizer.json")
    names = {source_name(role, spec.row.hf_names): shape for role, shape in spec.weight_shapes()}
    generator = np.random.default_rng(seed)
    with (folder / "model.safetensors").open("wb") as file:
        header = json.dumps(_header(names)).encode()
        file.write(len(header).to_bytes(8, "little") + header)
        for name, shape in names.items():
            for piece in _values(name, shape, generator):
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


def _config(spec: ModelSpec) -> dict[str, object]:
    return {
        "architectures": [spec.row.hf_classes[0]],
        "hidden_act": "silu",
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": spec.max_context,
        "rms_norm_eps": spec.norm_epsilon,
        "rope_theta": spec.rope.theta,
        "tie_word_embeddings": spec.tie_embeddings,
    }


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
