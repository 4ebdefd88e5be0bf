"""The numbers of each layer's xIELU (Huang and Schlag, 2025), which a GGUF file has in its metadata."""

import numpy as np

from pagelet.exporter.checkpoint.files import SourceFile
from pagelet.exporter.checkpoint.gguf_header import GGUFHeader
from pagelet.exporter.checkpoint.tensor_info import TensorInfo
from pagelet.models.errors import CheckpointError, UnsupportedError

_OF_LAYERS = ("xielu.alpha_p", "xielu.alpha_n")
# What Apertus has in all layers.
_FIXED = {"xielu.beta": 0.5, "xielu.eps": -1e-6}


def xielu_tensors(header: GGUFHeader, file: SourceFile, count: int) -> dict[str, TensorInfo]:
    """ "xielu.alpha_p.{layer}" and "xielu.alpha_n.{layer}", of one element each, for `count` layers.

    Raises:
        CheckpointError: the file does not have one float32 number for each layer.
        UnsupportedError: a parameter that is built in has another value.
    """
    found = {}
    for key in _OF_LAYERS:
        numbers = header.metadata.get(key)
        if not isinstance(numbers, np.ndarray) or (numbers.dtype, len(numbers)) != (np.dtype("<f4"), count):
            raise CheckpointError(
                f"{file.path}: {key!r} is {numbers!r:.80}; expected {count} float32 numbers."
            )
        for layer in range(count):
            name = f"{key}.{layer}"
            offset = header.arrays[key] + 4 * layer
            found[name] = TensorInfo(name, (1,), "F32", 4, file.path.name, offset)
    for key, value in _FIXED.items():
        given = np.asarray(header.metadata.get(key, value))
        if given.dtype.kind != "f" or (given.astype(np.float32) != np.float32(value)).any():
            raise UnsupportedError(f"{file.path}: {key!r} is {given!r:.80}; known is {value} only.")
    return found
