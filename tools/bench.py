"""How fast a bundle is on this machine: prefill and decode tokens per second, first token, memory."""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pagelet.models.errors import PageletError
from pagelet.models.manifest import Manifest, load_manifest
from pagelet.runtime import Engine, EngineConfig, SamplingParams
from pagelet.runtime.cores import physical_cores
from pagelet.tools import roofline
from pagelet.tools.memory import peak_rss
from pagelet.tools.roofline import Phase, Roofline


@dataclass(frozen=True)
class BenchOptions:
    """One measurement: `sequences` requests at once, `repeat` times after one warm-up."""

    prompt_tokens: int = 512
    new_tokens: int = 128
    sequences: int = 1
    repeat: int = 5
    threads: int | None = None
    kv_memory: str | None = None
    roofline: bool = True  # take the machine's limits too, afterwards


@dataclass(frozen=True)
class Run:
    """One timed run; tokens per second count all sequences together."""

    time_to_first_token_s: float
    prefill_tokens_per_second: float
    decode_tokens_per_second: float
    new_tokens_per_second: float
    seconds: float


@dataclass(frozen=True)
class BenchResult:
    """Medians over the runs, and the runs.

    `prefill` is all that comes before the last sequence's first token, `decode` one step after that; None
    for a single new token. `roofline` is None if it was not asked for, or `onnx` is not installed.
    """

    prefill_tokens_per_second: float
    decode_tokens_per_second: float
    new_tokens_per_second: float
    time_to_first_token_s: float
    load_s: float
    peak_rss_bytes: int
    prefill: Phase
    decode: Phase | None
    roofline: Roofline | None
    options: BenchOptions
    runs: list[Run] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def bench(bundle: Path, options: BenchOptions, on_run: Callable[[int, int, str], None]) -> BenchResult:
    """Open `bundle` and measure it.

    Prefill is the prompt's tokens over the time to the first token of the last sequence; decode is
    the tokens after the first over the time from then on.
    """
    config = EngineConfig(
        threads=options.threads,
        kv_memory=options.kv_memory,
        max_sequences=options.sequences,
        speculate="off",  # `tools.speculation_bench` measures that, on texts that are no random tokens
        prefix_cache=False,  # nothing may come from the cache, and a kept prefix would count as memory in use
    )
    began = time.perf_counter()
    with Engine.open(bundle, config) as engine:
        load = time.perf_counter() - began
        runs = []
        for index in range(options.repeat + 1):
            on_run(index, options.repeat + 1, "warm-up" if index == 0 else f"run {index}")
            runs.append(_run(engine, options, index))
    timed = runs[1:]

    def median(name: str) -> float:
        return float(statistics.median(getattr(run, name) for run in timed))

    memory = peak_rss()  # the roofline takes memory of its own
    limits = _roofline(options)
    prefill, decode = _phases(load_manifest(bundle), config, options, timed, limits)
    return BenchResult(
        prefill_tokens_per_second=median("prefill_tokens_per_second"),
        decode_tokens_per_second=median("decode_tokens_per_second"),
        new_tokens_per_second=median("new_tokens_per_second"),
        time_to_first_token_s=median("time_to_first_token_s"),
        load_s=load,
        peak_rss_bytes=memory,
        prefill=prefill,
        decode=decode,
        roofline=limits,
        options=options,
        runs=timed,
    )


def _roofline(options: BenchOptions) -> Roofline | None:
    if not options.roofline:
        return None
    try:
        return roofline.measure(options.threads or physical_cores())
    except ImportError:  # onnx comes with pagelet[export]
        return None


def _phases(
    manifest: Manifest, config: EngineConfig, options: BenchOptions, runs: list[Run], limits: Roofline | None
) -> tuple[Phase, Phase | None]:
    """Prefill, and one decode step at the mean length, both at their median times."""
    first = statistics.median(run.time_to_first_token_s for run in runs)
    work = roofline.prefill_work(manifest, options.prompt_tokens, options.sequences, config.max_step_tokens)
    prefill = roofline.compare(work, first, limits)
    if options.new_tokens == 1:
        return prefill, None
    steps = options.new_tokens - 1
    step = statistics.median((run.seconds - run.time_to_first_token_s) / steps for run in runs)
    context = options.prompt_tokens + options.new_tokens // 2
    work = roofline.decode_work(manifest, context, options.sequences)
    return prefill, roofline.compare(work, step, limits)


def _run(engine: Engine, options: BenchOptions, index: int) -> Run:
    params = SamplingParams(max_tokens=options.new_tokens, temperature=0, ignore_eos=True)
    prompts = _prompts(engine, options, index)
    began = time.perf_counter()
    requests = [engine.submit(prompt, params) for prompt in prompts]
    completions = [request.result() for request in requests]
    seconds = time.perf_counter() - began
    for completion in completions:
        if completion.usage.cached_tokens:
            raise PageletError(
                f"{completion.usage.cached_tokens} prompt tokens came from the cache: not a measurement."
            )
        if completion.usage.completion_tokens != options.new_tokens:
            raise PageletError(
                f"a run gave {completion.usage.completion_tokens} of {options.new_tokens} tokens "
                f"({completion.finish_reason}); ask for fewer, or give more --kv-memory."
            )
    first = max(completion.timings.time_to_first_token or 0.0 for completion in completions)
    later = options.sequences * (options.new_tokens - 1)
    return Run(
        time_to_first_token_s=first,
        prefill_tokens_per_second=options.sequences * options.prompt_tokens / first,
        decode_tokens_per_second=later / (seconds - first) if later else 0.0,
        new_tokens_per_second=options.sequences * options.new_tokens / seconds,
        seconds=seconds,
    )


def _prompts(engine: Engine, options: BenchOptions, index: int) -> list[list[int]]:
    """Random tokens; the first differs in every run and sequence, so that no cached prefix helps."""
    generator = np.random.default_rng(index)
    shape = (options.sequences, options.prompt_tokens)
    prompts = generator.integers(0, engine.vocab_size, shape)
    prompts[:, 0] = (index * options.sequences + np.arange(options.sequences)) % engine.vocab_size
    return [[int(token) for token in prompt] for prompt in prompts]
