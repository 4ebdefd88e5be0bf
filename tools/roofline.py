"""What this machine reaches at most, measured here, and what a model must read and multiply at least.

The roofline model: Williams, Waterman and Patterson 2009, "Roofline: an insightful visual performance model".
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from pagelet.models.cache import layer_bytes_per_token
from pagelet.models.manifest import Manifest
from pagelet.models.spec import read_share

_BUFFER_BYTES = 384 << 20  # more than any cache of a processor
_MATRIX = 1024
_TRIES = 5
_INTEGER_TYPES = ("int4", "int8")  # multiplied with activations rounded to int8


@dataclass(frozen=True)
class Roofline:
    """The best of a few tries, with `threads` threads.

    Attributes:
        read_bytes_per_second: NumPy's maximum over a buffer that no cache holds, a part per thread.
        int8_macs_per_second: multiply-adds of ONNX Runtime's MatMulInteger, u8 × s8, 1024 × 1024 × 1024.
        float32_macs_per_second: of its MatMul in float32, of the same size.
    """

    threads: int
    read_bytes_per_second: float
    int8_macs_per_second: float
    float32_macs_per_second: float


@dataclass(frozen=True)
class Work:
    """Bytes that must be read and multiply-adds that must be done; what is written is not counted."""

    read_bytes: int
    int8_macs: int
    float32_macs: int


@dataclass(frozen=True)
class Limits:
    """How near a phase is to what the machine allows.

    Attributes:
        memory_share, arithmetic_share: the least time for the reads, or for the multiply-adds, over the
            measured time; 1 is the limit. Reads pass it where caches hold a part of the weights.
        next: the limit that is nearer, so the one that is met first.
    """

    memory_share: float
    arithmetic_share: float
    next: Literal["memory", "arithmetic"]


@dataclass(frozen=True)
class Phase:
    """A measured time, what had to be done in it, and how near to the limits that is, if they were taken."""

    seconds: float
    work: Work
    read_bytes_per_second: float
    limits: Limits | None


def compare(work: Work, seconds: float, roofline: Roofline | None) -> Phase:
    """`work` took `seconds`."""
    limits = _limits(work, seconds, roofline) if roofline else None
    return Phase(seconds, work, work.read_bytes / seconds, limits)


def _limits(work: Work, seconds: float, roofline: Roofline) -> Limits:
    memory = work.read_bytes / roofline.read_bytes_per_second
    arithmetic = (
        work.int8_macs / roofline.int8_macs_per_second + work.float32_macs / roofline.float32_macs_per_second
    )
    nearer: Literal["memory", "arithmetic"] = "memory" if memory >= arithmetic else "arithmetic"
    return Limits(memory / seconds, arithmetic / seconds, nearer)


def decode_work(manifest: Manifest, context: int, sequences: int) -> Work:
    """One decode step: a new token for each of `sequences`, whose caches hold `context` tokens on average.

    Linear weights and the head are read once for all of them, each cache once by each layer that reads it; of
    tables, only rows; of experts, as many as the tokens choose if all choose others.
    """
    weights = _linear(manifest, (*_layers(manifest), _head(manifest)), sequences)
    cache, attention = _attention(manifest, [context])
    return Work(
        weights.read_bytes + sequences * cache,
        sequences * weights.int8_macs,
        sequences * (weights.float32_macs + attention),
    )


def prefill_work(manifest: Manifest, prompt_tokens: int, sequences: int, step_tokens: int) -> Work:
    """Prompts of `prompt_tokens` in steps of at most `step_tokens`, which read all weights each.

    The head multiplies each prompt's last row only. The cache is read once for each chunk of a prompt.
    """
    layers = _linear(manifest, _layers(manifest), step_tokens)
    head = _linear(manifest, [_head(manifest)], step_tokens)
    steps = math.ceil(sequences * prompt_tokens / step_tokens)
    ends = [*range(step_tokens, prompt_tokens, step_tokens), prompt_tokens]
    cache, _ = _attention(manifest, ends)
    _, attention = _attention(manifest, range(1, prompt_tokens + 1))
    return Work(
        steps * (layers.read_bytes + head.read_bytes) + sequences * cache,
        sequences * (prompt_tokens * layers.int8_macs + head.int8_macs),
        sequences * (prompt_tokens * layers.float32_macs + head.float32_macs + attention),
    )


def _head(manifest: Manifest) -> str:
    return "embedding" if manifest.spec.tie_embeddings else "head"


def _layers(manifest: Manifest) -> list[str]:
    return [name for name in manifest.tensors if name not in ("embedding", "head", "layer_inputs.table")]


def _linear(manifest: Manifest, names: Iterable[str], rows: int) -> Work:
    """One row through these weights; what is read, of `rows` together."""
    read = int8 = float32 = 0
    for name in names:
        tensor, expert = manifest.tensors[name], ".experts." in name
        read += int(tensor.bytes * (read_share(manifest.spec, rows) if expert else 1))
        macs = int(math.prod(tensor.shape) * (read_share(manifest.spec, 1) if expert else 1))
        int8 += macs if tensor.type in _INTEGER_TYPES else 0
        float32 += macs if tensor.type not in _INTEGER_TYPES else 0
    return Work(read, int8, float32)


def _attention(manifest: Manifest, lengths: Sequence[int]) -> tuple[int, int]:
    """Cache bytes and multiply-adds of one row of queries over each of `lengths` tokens, in all layers."""
    spec = manifest.spec
    read = macs = 0
    for layer, kind in enumerate(spec.layers):
        tokens = sum(min(length, kind.window or length) for length in lengths)
        read += layer_bytes_per_token(spec, layer, manifest.cache_type) * tokens
        macs += 2 * spec.query_size(layer) * tokens  # query × key, then weight × value
    return read, macs


def measure(threads: int) -> Roofline:
    """Take the machine's limits; about two seconds and 400 MB of memory.

    Raises:
        ImportError: without `onnx`, which describes the matrix product to ONNX Runtime.
    """
    return Roofline(
        threads,
        read_bandwidth(threads),
        multiply_rate("MatMulInteger", np.uint8, np.int8, threads),
        multiply_rate("MatMul", np.float32, np.float32, threads),
    )


def read_bandwidth(threads: int) -> float:
    """Bytes per second that `threads` threads read together."""
    buffer = np.ones(_BUFFER_BYTES // 8, np.int64)  # ones: pages of zeros may all be one page
    parts = np.array_split(buffer, threads)
    with ThreadPoolExecutor(threads) as pool:
        return buffer.nbytes / _best(lambda: list(pool.map(np.max, parts)))  # max lets other threads run


def multiply_rate(operator: str, left: type, right: type, threads: int) -> float:
    """Multiply-adds per second of a square product in ONNX Runtime, `right` constant as weights are."""
    import onnxruntime as ort
    from onnx import TensorProto, helper, numpy_helper

    element = helper.np_dtype_to_tensor_dtype
    out = TensorProto.FLOAT if left is np.float32 else TensorProto.INT32
    shape = (_MATRIX, _MATRIX)
    graph = helper.make_graph(
        [helper.make_node(operator, ["a", "b"], ["y"])],
        "product",
        [helper.make_tensor_value_info("a", element(np.dtype(left)), shape)],
        [helper.make_tensor_value_info("y", out, shape)],
        [numpy_helper.from_array(np.ones(shape, right), "b")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    feed: dict[str, Any] = {"a": np.ones(shape, left)}
    return _MATRIX**3 / _best(lambda: session.run(None, feed))


def _best(work: Callable[[], object]) -> float:
    """Seconds of the fastest of some tries, after one that is not counted."""
    times = []
    for _ in range(_TRIES + 1):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times[1:])
