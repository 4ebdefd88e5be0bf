"""Engines over the TensorRT backend on a device of paper say, token by token, what engines on the CPU say."""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exporting import uncertified
from fake_device import BLOCK_SIZE, Device, open_device
from test_speculation_trees import TreeProposer

from pagelet.exporter import export
from pagelet.models.errors import SessionError
from pagelet.models.manifest import load_manifest
from pagelet.models.text import Tokenizer
from pagelet.runtime import Engine, EngineConfig, SamplingParams
from pagelet.runtime.speculation.draft import DraftProposer
from pagelet.runtime.speculation.proposer import Proposer

Tokens = list[tuple[int, ...]]


@pytest.fixture(scope="module")
def bundles(
    make_llama: Callable[..., Path],
    make_windowed: Callable[[int], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bundles")
    llama = make_llama()
    export(llama, folder / "llama", uncertified(weights="int4", cache_type="int8", block_size=BLOCK_SIZE))
    export(llama, folder / "draft", uncertified(weights="fp32", cache_type="f16", block_size=BLOCK_SIZE))
    windowed = uncertified(weights="fp32", cache_type="f16", block_size=BLOCK_SIZE)
    export(make_windowed(20), folder / "windowed", windowed)
    return {name: folder / name for name in ("llama", "draft", "windowed")}


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Device]:
    with open_device(tmp_path) as device:
        yield device


def open_engine(
    device: Device,
    bundle: Path,
    proposers: list[Proposer] | None = None,
    kv_bytes: int = 1 << 20,
    **config: Any,
) -> Engine:
    settings = EngineConfig(**({"max_sequences": 6, "max_step_tokens": 64} | config))
    manifest = load_manifest(bundle)
    tokenizer = Tokenizer.open(bundle, manifest.text)
    backend = device.open(bundle, kv_bytes=kv_bytes)
    return Engine(backend, tokenizer, settings, manifest=manifest, proposers=proposers)


def prompts() -> list[list[int]]:
    """Some repeat themselves, some begin alike, one is longer than a step."""
    draw = random.Random(4)
    first = [draw.randrange(2, 258) for _ in range(40)]
    return [
        first,
        first[:24] + [draw.randrange(2, 258) for _ in range(9)],
        [draw.randrange(2, 258)],
        first[:7] * 4,
        [draw.randrange(2, 258) for _ in range(150)],
        first[10:13] * 5,
        first,
    ]


def answers(engine: Engine, params: SamplingParams) -> Tokens:
    # They arrive between two steps, and run in batches of every size as they end.
    asked = [replace(params, max_tokens=12 + 5 * index) for index in range(len(prompts()))]
    requests = engine._loop.call(
        lambda: [engine.submit(prompt, params) for prompt, params in zip(prompts(), asked, strict=True)]
    )
    done = [request.result(timeout=120).token_ids for request in requests]
    engine.check_integrity()
    return done


@pytest.fixture(scope="module")
def expected(bundles: dict[str, Path]) -> dict[tuple[str, float], Tokens]:
    found = {}
    for name in ("llama", "windowed"):
        config = EngineConfig(kv_memory="8MiB", threads=1, speculate="off", prefix_cache=False)
        with Engine.open(bundles[name], config) as engine:
            for temperature in (0.0, 0.8):
                found[name, temperature] = answers(engine, params_of(temperature))
    return found


def params_of(temperature: float) -> SamplingParams:
    return SamplingParams(ignore_eos=True, temperature=temperature, seed=5)


@pytest.mark.parametrize("name", ["llama", "windowed"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("speculate", ["off", "ngram"])
def test_tokens_are_the_cpus(
    device: Device,
    bundles: dict[str, Path],
    expected: dict[tuple[str, float], Tokens],
    name: str,
    temperature: float,
    speculate: str,
) -> None:
    guesses = {"num_draft_tokens": 4} if speculate == "ngram" else {}
    with open_engine(device, bundles[name], speculate=speculate, **guesses) as engine:
        params = params_of(temperature)
        assert answers(engine, params) == expected[name, temperature]
        assert answers(engine, params) == expected[name, temperature]  # what was cached is found
        stats = engine.stats()
        assert stats.prefix_hit_rate > 0.2
        assert (stats.drafted_tokens > 0) == (speculate == "ngram")
        assert stats.failed_steps == 0
        assert device.cuda.names().count("cuGraphLaunch") > 20
    # Of 1, 2, 4 and 8 sequences, or fewer kinds.
    assert 1 < device.cuda.names().count("cuGraphInstantiate") <= 4


def test_few_blocks_and_small_steps(
    device: Device, bundles: dict[str, Path], expected: dict[tuple[str, float], Tokens]
) -> None:
    few = 30 * BLOCK_SIZE * 2 * 2 * 2 * (16 + 4)  # K and V, layers, KV heads, head size and scale
    with open_engine(device, bundles["llama"], kv_bytes=few, max_step_tokens=24) as engine:
        assert answers(engine, params_of(0.0)) == expected["llama", 0.0]
        assert engine.stats().preemptions > 0


@pytest.mark.parametrize("name", ["llama", "windowed"])
@pytest.mark.parametrize("size", [3, 20])
def test_trees_are_verified_and_accepted(
    device: Device, bundles: dict[str, Path], expected: dict[tuple[str, float], Tokens], name: str, size: int
) -> None:
    texts = [prompt + list(reply) for prompt, reply in zip(prompts(), expected[name, 0.0], strict=True)]
    proposer = TreeProposer(texts, size, seed=size)
    with open_engine(device, bundles[name], [proposer], num_draft_tokens=size, max_sequences=3) as engine:
        assert answers(engine, params_of(0.0)) == expected[name, 0.0]
        assert engine.stats().speculation_failure is None
    assert proposer.num_accepted > 0
    assert proposer.num_moved > 0, "no accepted candidate had to be moved behind the one before it"


def test_a_prompt_is_read_beside_a_tree(device: Device, bundles: dict[str, Path]) -> None:
    """A mask has a bit for each row of the longest sequence, be it a chain."""
    asked = [[5, 6, 7], [*prompts()[4], *prompts()[0], *range(2, 12)]]  # 125 rows of the second, then 75
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    with Engine.open(bundles["llama"], EngineConfig(kv_memory="1MiB", threads=1)) as cpu:
        wanted = [cpu.generate(prompt, params).token_ids for prompt in asked]
    proposer = TreeProposer([[*text, *reply] for text, reply in zip(asked, wanted, strict=True)], 20, seed=0)
    config = {"num_draft_tokens": 20, "max_step_tokens": 128}
    with open_engine(device, bundles["llama"], [proposer], **config) as engine:
        requests = engine._loop.call(lambda: [engine.submit(prompt, params) for prompt in asked])
        assert [request.result(timeout=60).token_ids for request in requests] == wanted


def test_a_draft_runs_beside_its_target(
    device: Device, bundles: dict[str, Path], expected: dict[tuple[str, float], Tokens]
) -> None:
    """Two engines on one device, each with its cache, its stream and its graphs, in one thread."""
    draft, target = device.open(bundles["draft"]), device.open(bundles["llama"])
    proposer = DraftProposer(
        draft, vocab_size=320, context=512, max_sequences=6, max_step_tokens=64, prefix_cache=True
    )
    proposer.measure()
    tokenizer = Tokenizer.open(bundles["llama"], load_manifest(bundles["llama"]).text)
    config = EngineConfig(num_draft_tokens=3, max_sequences=6, max_step_tokens=64)
    with Engine(target, tokenizer, config, proposers=[proposer]) as engine:
        engine._loop.measure_steps()
        assert answers(engine, params_of(0.0)) == expected["llama", 0.0]
        assert engine.stats().accepted_tokens > 0
    device.assert_nothing_is_left()


def test_logits_of_every_position(device: Device, bundles: dict[str, Path]) -> None:
    with Engine.open(bundles["windowed"], EngineConfig(kv_memory="1MiB", threads=1)) as engine:
        wanted = engine.logits(prompts()[4])
    with open_engine(device, bundles["windowed"]) as engine:
        np.testing.assert_array_equal(engine.logits(prompts()[4]), wanted)


@pytest.mark.parametrize("name", ["llama", "windowed"])
def test_a_saved_session_goes_on_there_and_nowhere_else(
    device: Device,
    bundles: dict[str, Path],
    expected: dict[tuple[str, float], Tokens],
    name: str,
    tmp_path: Path,
) -> None:
    params = replace(params_of(0.0), max_tokens=12)
    with open_engine(device, bundles[name]) as engine:
        request = engine.submit(prompts()[0], params)
        request.result(timeout=60)
        engine.save_session(tmp_path / "saved", request)
        going_on = engine.submit([*prompts()[0], *request.result().token_ids], params)
        wanted = going_on.result(timeout=60).token_ids
    with open_engine(device, bundles[name]) as engine:
        session = engine.load_session(tmp_path / "saved")
        assert session.restored_tokens == 48
        done = engine.generate(session.token_ids, params)
        assert done.token_ids == wanted
        assert done.usage.cached_tokens == 48
    with Engine.open(bundles[name]) as cpu, pytest.raises(SessionError, match="sm89"):
        cpu.load_session(tmp_path / "saved")
