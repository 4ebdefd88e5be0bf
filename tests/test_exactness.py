"""The same 64 requests, served in every way there is, give the same tokens to the bit; on the real ops."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from exporting import uncertified

from pagelet.exporter import export
from pagelet.runtime import Engine, EngineConfig, SamplingParams

Ask = tuple[list[int], SamplingParams]
Tokens = list[tuple[int, ...]]
NEW_TOKENS = 16


def requests() -> list[Ask]:
    """Prompts of 1 to 140 tokens, many with one of three beginnings in common; every other one is seeded."""
    generator = np.random.default_rng(4)
    beginnings = [generator.integers(2, 258, 90).tolist() for _ in range(3)]
    asks = []
    for index in range(64):
        shared = beginnings[index % 3][: int(generator.choice([0, 40, 90]))]
        prompt = shared + generator.integers(2, 258, int(generator.integers(1, 50))).tolist()
        greedy = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
        seeded = SamplingParams(
            max_tokens=NEW_TOKENS,
            ignore_eos=True,
            temperature=0.8,
            top_p=0.9,
            seed=index,
            repetition_penalty=1.1,
        )
        asks.append((prompt, seeded if index % 2 else greedy))
    return asks


def at_once(engine: Engine, asks: list[Ask]) -> Tokens:
    # They arrive between two steps: how many wait together does not depend on the machine.
    handles = engine._loop.call(lambda: [engine.submit(prompt, params) for prompt, params in asks])
    return [handle.result().token_ids for handle in handles]


@pytest.fixture(scope="module", params=["f32", "f16", "int8", "fp8"])
def bundle(
    request: pytest.FixtureRequest, make_llama: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    out = tmp_path_factory.mktemp("exactness") / request.param
    export(make_llama(), out, uncertified(cache_type=request.param, block_size=16))
    return out


@pytest.fixture(scope="module")
def alone(bundle: Path) -> Tokens:
    """Each by itself, its prompt read in one step, nothing taken from the cache."""
    with Engine.open(bundle, EngineConfig(kv_memory="8MiB", threads=1, prefix_cache=False)) as engine:
        return [engine.generate(prompt, params).token_ids for prompt, params in requests()]


def test_batched(bundle: Path, alone: Tokens) -> None:
    with Engine.open(bundle, EngineConfig(kv_memory="8MiB", threads=2)) as engine:
        assert at_once(engine, requests()) == alone


def test_chunked(bundle: Path, alone: Tokens) -> None:
    with Engine.open(bundle, EngineConfig(kv_memory="8MiB", max_step_tokens=19, max_sequences=5)) as engine:
        assert at_once(engine, requests()) == alone


def test_preempted(bundle: Path, alone: Tokens) -> None:
    with Engine.open(bundle, EngineConfig(kv_memory="8MiB")) as engine:
        per_block = engine.stats().kv_bytes // engine.stats().blocks_total
    # 12 blocks hold the longest sequence and little else.
    with Engine.open(bundle, EngineConfig(kv_memory=12 * per_block, prefix_cache=False)) as engine:
        assert at_once(engine, requests()) == alone
        assert engine.stats().preemptions > 0


def test_with_prefix_hits(bundle: Path, alone: Tokens) -> None:
    with Engine.open(bundle, EngineConfig(kv_memory="8MiB")) as engine:
        at_once(engine, requests())
        before = engine.stats().cached_tokens
        assert at_once(engine, requests()) == alone
        assert engine.stats().cached_tokens > before


def test_after_a_reload(bundle: Path, alone: Tokens, tmp_path: Path) -> None:
    """Half of the tokens in one engine, the rest in another that knows only the saved sessions."""
    config = EngineConfig(kv_memory="8MiB")
    with Engine.open(bundle, config) as engine:
        for index, (prompt, params) in enumerate(requests()):
            half = SamplingParams(**{**vars(params), "max_tokens": NEW_TOKENS // 2})
            handle = engine.submit(prompt, half)
            handle.result()
            engine.save_session(tmp_path / str(index), handle)
    with Engine.open(bundle, config) as engine:
        for index, (prompt, _) in enumerate(requests()):
            session = engine.load_session(tmp_path / str(index))
            rest = engine.resume(session, max_tokens=NEW_TOKENS // 2).result().token_ids
            assert (*session.token_ids[len(prompt) :], *rest) == alone[index]


def test_logits_are_equal_to_the_bit(bundle: Path) -> None:
    prompt = requests()[5][0] + requests()[6][0]
    with Engine.open(bundle, EngineConfig(kv_memory="8MiB", threads=1)) as engine:
        expected = engine.logits(prompt)
    with Engine.open(
        bundle, EngineConfig(kv_memory="8MiB", threads=2, max_step_tokens=7, max_sequences=4)
    ) as engine:
        at_once(engine, requests()[:8])
        assert np.array_equal(engine.logits(prompt), expected)
