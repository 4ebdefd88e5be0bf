"""What a shared prefix saves: time to first token of a second request that begins alike, over the first's."""

import argparse
import statistics
import sys
from pathlib import Path

import numpy as np

from pagelet.models.errors import PageletError
from pagelet.runtime import Completion, Engine, EngineConfig, SamplingParams


def measure(engine: Engine, prefix_tokens: int, own_tokens: int, seed: int) -> tuple[Completion, Completion]:
    """Two requests, one after the other, whose first `prefix_tokens` are the same."""
    generator = np.random.default_rng(seed)

    def tokens(count: int) -> list[int]:
        return [int(token) for token in generator.integers(0, engine.vocab_size, count)]

    shared, params = tokens(prefix_tokens), SamplingParams(max_tokens=2, ignore_eos=True)
    first, second = (engine.generate(shared + tokens(own_tokens), params) for _ in range(2))
    if first.usage.cached_tokens or not second.usage.cached_tokens:
        raise PageletError(
            f"not a measurement: cached {first.usage.cached_tokens}, {second.usage.cached_tokens}."
        )
    return first, second


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--prefix-tokens", type=int, default=1000)
    parser.add_argument("--own-tokens", type=int, default=20)
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    times = []
    with Engine.open(args.bundle, EngineConfig(threads=2, speculate="off")) as engine:
        for seed in range(args.repeat + 1):  # the first warms up
            pair = measure(engine, args.prefix_tokens, args.own_tokens, seed)
            times.append([completion.timings.time_to_first_token or 0.0 for completion in pair])
            cached = pair[1].usage.cached_tokens
    ratio = statistics.median(second / first for first, second in times[1:])
    first, second = (statistics.median(column) for column in zip(*times[1:], strict=True))
    print(f"first token: {first:.3f} s, then {second:.3f} s with {cached} tokens cached: ratio {ratio:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
