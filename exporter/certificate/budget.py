"""How many tokens can be compared in so many seconds: measured on one layer, and carried over to all."""

from collections.abc import Callable
from time import perf_counter

import numpy as np

from pagelet.exporter.certificate.held_out import MAX_TOKENS, MIN_TOKENS
from pagelet.exporter.graph import CacheFormat
from pagelet.exporter.layerwise import Layerwise, Texts
from pagelet.exporter.original import Original
from pagelet.exporter.part import Part
from pagelet.exporter.stream import Stream
from pagelet.models.distance import LogitsDistance

_FEW, _MORE = 8, 72  # tokens of two runs; they differ by what 64 tokens cost
# Of what is left: longer windows and a busy machine take more than was measured.
_MARGIN = 0.8


def affordable_tokens(
    original: Original, bundle: Part, cache: CacheFormat, seconds: float, extra: int, threads: int
) -> int:
    """Tokens of held-out text beside `extra` golden ones: MIN_TOKENS to MAX_TOKENS."""
    spec = bundle.spec
    if spec.max_context < _MORE:
        return MIN_TOKENS  # there is little to measure, and little to run
    start = perf_counter()
    part = original.layer(0)
    load = perf_counter() - start
    plain = CacheFormat(cache.block_size, "f32")
    # The bundle's layer runs a second time, on the original's input.
    few, more = (
        _layer_seconds(part, plain, count, threads) + 2 * _layer_seconds(bundle, cache, count, threads)
        for count in (_FEW, _MORE)
    )
    a_token = max(more - few, 0.0) / (_MORE - _FEW)
    layer_size = (
        spec.hidden_size * (spec.query_size(0) + spec.kv_size(0) + 1.5 * spec.layers[0].intermediate_size) * 2
    )
    head_size = spec.vocab_size * spec.hidden_size / layer_size  # in layers
    fixed = (spec.num_layers + head_size) * (load + few)
    per_token = (spec.num_layers + head_size) * a_token + _compare_seconds(spec.vocab_size)
    left = max(seconds - (perf_counter() - start) - fixed, 0.0) * _MARGIN
    return int(np.clip(left / per_token - extra, MIN_TOKENS, MAX_TOKENS))


def _layer_seconds(part: Part, cache: CacheFormat, count: int, threads: int) -> float:
    """Of a part's layer 0 over `count` tokens; what stands in them makes no difference."""
    run = Layerwise(Texts.of([[0] * count]), cache, threads=threads)
    stream = Stream.noise(part.spec, count)
    return _fastest(lambda: run.layer(part, 0, stream))


def _compare_seconds(vocab_size: int) -> float:
    """Of the comparison of one row of logits."""
    logits = np.random.default_rng(0).standard_normal((16, vocab_size), np.float32)
    return _fastest(lambda: LogitsDistance().add(logits, logits, np.zeros(16, np.int64))) / 16


def _fastest(work: Callable[[], object]) -> float:
    times = []
    for _ in range(2):  # the first one maps pages
        start = perf_counter()
        work()
        times.append(perf_counter() - start)
    return min(times)
