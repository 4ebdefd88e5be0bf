"""pagelet itself, as one more engine."""

import time
from pathlib import Path

from pagelet.models.cache import cache_bytes_per_token
from pagelet.models.manifest import load_manifest
from pagelet.runtime import Engine, EngineConfig, SamplingParams


class PageletEngine:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def run(self, prompts: list[list[int]], new_tokens: int) -> tuple[float, float, int]:
        params = SamplingParams(max_tokens=new_tokens, temperature=0, ignore_eos=True)
        began = time.perf_counter()
        requests = [self._engine.submit(prompt, params) for prompt in prompts]
        done = [request.result() for request in requests]
        seconds = time.perf_counter() - began
        if any(completion.usage.cached_tokens for completion in done):
            raise RuntimeError("prompt tokens came from the cache: not a measurement")
        first = max(completion.timings.time_to_first_token or 0.0 for completion in done)
        return first, seconds, sum(completion.usage.completion_tokens for completion in done)


def open_engine(model: Path, threads: int, tokens: int) -> PageletEngine:
    manifest = load_manifest(model)
    # Each of up to 32 sequences may leave a block of its own partly filled.
    room = tokens + 32 * manifest.block_size
    memory = room * cache_bytes_per_token(manifest.spec, manifest.cache_type)
    return PageletEngine(
        Engine.open(
            model, EngineConfig(threads=threads, kv_memory=memory, prefix_cache=False, speculate="off")
        )
    )
