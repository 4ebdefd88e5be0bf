"""One tensor of a checkpoint, before it is read."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a checkpoint.

    Attributes:
        name: as in the file.
        shape: row-major; linear weights are [out, in] (a GGUF file's dimensions reversed).
        dtype: "F32", "BF16", "F16", "Q4_1", …
        nbytes: bytes in the file.
        file: the file's name.
        offset: its first byte there.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    file: str
    offset: int
