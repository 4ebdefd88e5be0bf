"""How much space a model's weights take: bits per weight, from what its own header says."""

from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from math import prod
from pathlib import Path

from pagelet.models.manifest import Manifest

_TABLES = frozenset({"embedding", "head"})
_GGUF_TABLES = frozenset({"token_embd.weight", "output.weight"})


@dataclass(frozen=True)
class Storage:
    """Of one model.

    Attributes:
        bytes: of all its files, the tokenizer and the graph too.
        bits_per_weight: of all matrices with their scales, embedding table and head included.
        layer_bits_per_weight: the same without these two.
        exact: all matrices are the checkpoint's own numbers; nothing was rounded.
    """

    bytes: int
    bits_per_weight: float
    layer_bits_per_weight: float
    exact: bool = False


def bundle_storage(manifest: Manifest) -> Storage:
    """Of a bundle."""
    size = sum(entry.bytes for entry in manifest.files.values())
    matrices = {name: (entry.bytes, prod(entry.shape)) for name, entry in manifest.tensors.items()}
    exact = all(entry.exact for entry in manifest.tensors.values())
    return _storage(size, matrices, _TABLES, exact)


def gguf_storage(path: Path) -> Storage:
    """Of a GGUF file; its vectors (norms) do not count as weights.

    Raises:
        CheckpointError: it is damaged.
    """
    from pagelet.exporter.checkpoint.files import SourceFile
    from pagelet.exporter.checkpoint.gguf_header import read_header

    with closing(SourceFile(path)) as file:
        tensors = read_header(file).tensors
    matrices = {
        name: (info.nbytes, prod(info.shape)) for name, info in tensors.items() if len(info.shape) == 2
    }
    return _storage(path.stat().st_size, matrices, _GGUF_TABLES)


def _storage(
    size: int, matrices: Mapping[str, tuple[int, int]], tables: frozenset[str], exact: bool = False
) -> Storage:
    layers = [matrix for name, matrix in matrices.items() if name not in tables]
    return Storage(size, _bits(matrices.values()), _bits(layers), exact)


def _bits(matrices: Iterable[tuple[int, int]]) -> float:
    """Bits per weight over (bytes, weights) of matrices."""
    sizes, weights = zip(*matrices, strict=True)
    return float(8 * sum(sizes) / sum(weights))
