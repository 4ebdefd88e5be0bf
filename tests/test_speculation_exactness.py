"""Speculation is exactly lossless on the real ops: 200 prompts, every way to guess, token by token.

Each combination takes a share of the prompts, so that all combinations and all prompts have their turn;
PAGELET_FULL_EXACTNESS=1 takes all prompts in each of them, which takes an hour.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from exporting import uncertified

from pagelet.exporter import export
from pagelet.runtime import Engine, EngineConfig, SamplingParams
from pagelet.runtime.speculation.costs import StepCosts

Ask = tuple[list[int], SamplingParams]
Tokens = list[tuple[int, ...]]
NUM_PROMPTS = 200
NEW_TOKENS = 20
KS = range(17)
PROPOSERS = ("ngram", "int4", "other")
MAX_SEQUENCES = (1, 3, 8)
FULL = os.environ.get("PAGELET_FULL_EXACTNESS") == "1"
# Prompts of a combination otherwise: as many as run at once at most.
SHARE = 8
MEMORY = "8MiB"


def prompts() -> list[list[int]]:
    """Of 1 to 60 tokens; two of three repeat a part of themselves, which gives n-grams something to find."""
    generator = np.random.default_rng(6)
    found = []
    for index in range(NUM_PROMPTS):
        part: list[int] = generator.integers(2, 258, int(generator.integers(1, 20))).tolist()
        found.append(part * (1 + index % 3))
    return found


def asks(sampled: bool) -> list[Ask]:
    """Each prompt, greedy or with its own seed."""
    params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
    if not sampled:
        return [(prompt, params) for prompt in prompts()]
    seeded = replace(params, temperature=0.8, top_p=0.9)
    return [(prompt, replace(seeded, seed=index)) for index, prompt in enumerate(prompts())]


def share_of(combination: int) -> list[int]:
    """Which prompts a combination takes."""
    if FULL:
        return list(range(NUM_PROMPTS))
    return [(combination * SHARE + index) % NUM_PROMPTS for index in range(SHARE)]


def at_once(engine: Engine, asked: list[Ask]) -> Tokens:
    # They arrive between two steps: how many wait together does not depend on the machine.
    handles = engine._loop.call(lambda: [engine.submit(prompt, params) for prompt, params in asked])
    return [handle.result(timeout=120).token_ids for handle in handles]


class Bundles(NamedTuple):
    target: Path
    drafts: dict[str, Path]

    def open(self, proposer: str, **config: Any) -> Engine:
        settings: dict[str, Any] = {"kv_memory": MEMORY, "threads": 1} | config
        if proposer == "ngram":
            return Engine.open(self.target, EngineConfig(speculate="ngram", **settings))
        return Engine.open(
            self.target, EngineConfig(speculate="draft", draft=self.drafts[proposer], **settings)
        )


@pytest.fixture(scope="module")
def bundles(make_llama: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Bundles:
    """A target in fp32, its own checkpoint in int4, and a smaller model that knows nothing of it."""
    out = tmp_path_factory.mktemp("speculation")
    checkpoint = make_llama()
    export(checkpoint, out / "fp32", uncertified(weights="fp32", block_size=16))
    export(checkpoint, out / "int4", uncertified(weights="int4", block_size=16))
    other = make_llama(seed=7, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    export(other, out / "other", uncertified(weights="fp32", block_size=16))
    return Bundles(out / "fp32", {"int4": out / "int4", "other": out / "other"})


@pytest.fixture(scope="module")
def plain(bundles: Bundles) -> dict[bool, Tokens]:
    """Greedy and sampled: each prompt by itself, nobody guessing."""
    config = EngineConfig(kv_memory=MEMORY, threads=1, speculate="off", prefix_cache=False)
    with Engine.open(bundles.target, config) as engine:
        return {
            sampled: [engine.generate(prompt, params).token_ids for prompt, params in asks(sampled)]
            for sampled in (False, True)
        }


@pytest.mark.parametrize("max_sequences", MAX_SEQUENCES)
@pytest.mark.parametrize("proposer", PROPOSERS)
def test_tokens_are_plain_decodings(
    bundles: Bundles, plain: dict[bool, Tokens], proposer: str, max_sequences: int
) -> None:
    first = PROPOSERS.index(proposer) * len(MAX_SEQUENCES) + MAX_SEQUENCES.index(max_sequences)
    drafted = accepted = 0
    for k in KS:
        with bundles.open(proposer, num_draft_tokens=k, max_sequences=max_sequences) as engine:
            for sampled in (False, True):
                chosen = share_of((first * len(KS) + k) * 2 + sampled)
                asked = [asks(sampled)[index] for index in chosen]
                assert at_once(engine, asked) == [plain[sampled][index] for index in chosen]
            engine.check_integrity()
            stats = engine.stats()
            assert stats.blocks_used == 0
            assert stats.speculation_failure is None
            if proposer != "ngram":
                assert (stats.drafted_tokens > 0) == (k > 0)
            drafted += stats.drafted_tokens
            accepted += stats.accepted_tokens
    assert 0 < accepted <= drafted, "speculation was idle"


@pytest.mark.parametrize("proposer", PROPOSERS)
def test_however_the_requests_are_served(bundles: Bundles, plain: dict[bool, Tokens], proposer: str) -> None:
    """Chunked prompts, few blocks, hits of the prefix cache: twice sixteen requests at once."""
    with bundles.open(proposer, num_draft_tokens=5) as engine:
        memory = engine.stats().kv_bytes // engine.stats().blocks_total * 6
        assert at_once(engine, asks(True)[:16]) == plain[True][:16]
        assert at_once(engine, asks(True)[:16]) == plain[True][:16]
        engine.check_integrity()
    if proposer != "ngram":
        memory = 2 * memory
    few = {"kv_memory": memory, "max_step_tokens": 9, "max_sequences": 8, "threads": 2}
    preemptions = 0
    for sampled in (False, True):
        with bundles.open(proposer, num_draft_tokens=5, prefix_cache=False, **few) as engine:
            assert at_once(engine, asks(sampled)[:16]) == plain[sampled][:16]
            preemptions += engine.stats().preemptions
            assert engine.stats().drafted_tokens > 0
            engine.check_integrity()
    if proposer != "other":  # its tokens take less, so that more of the target's find room
        assert preemptions > 0


@pytest.fixture(params=["cheap rows", "at random", "growing"])
def made_up_costs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Steps seem to take other times than they do, so that the plans differ from step to step."""
    generator = np.random.default_rng(3)
    count = StepCosts.count
    times: dict[str, Callable[[int], float]] = {
        "cheap rows": lambda rows: 1.0,
        "at random": lambda rows: float(generator.uniform(0.001, 1.0)),
        "growing": lambda rows: 0.1 + 0.01 * rows,
    }
    seconds_of = times[request.param]
    monkeypatch.setattr(StepCosts, "count", lambda self, rows, seconds: count(self, rows, seconds_of(rows)))
    name: str = request.param
    return name


@pytest.mark.parametrize("proposer", ["ngram", "int4"])
def test_whatever_steps_seem_to_cost(
    bundles: Bundles, plain: dict[bool, Tokens], made_up_costs: str, proposer: str
) -> None:
    # Beside others a row must have been tried before it seems cheap; alone it is expected to be.
    with bundles.open(proposer, max_sequences=1 if made_up_costs == "cheap rows" else 4) as engine:
        for sampled in (False, True):
            assert at_once(engine, asks(sampled)[20:70]) == plain[sampled][20:70]
        engine.check_integrity()
        if (made_up_costs, proposer) == ("cheap rows", "ngram"):  # a draft's row seems to cost a whole step
            assert engine.stats().drafted_tokens > 0


@pytest.mark.parametrize("cache_type", ["f16", "int8", "fp8"])
def test_caches_that_round(make_llama: Callable[..., Path], tmp_path: Path, cache_type: str) -> None:
    """Greedy texts of the int4 target with the same model in fp32, and a cache of its own type, as draft."""
    checkpoint = make_llama()
    export(checkpoint, tmp_path / "target", uncertified(cache_type=cache_type, block_size=8))
    export(checkpoint, tmp_path / "draft", uncertified(weights="fp32", cache_type="f32"))
    _check_both(Bundles(tmp_path / "target", {"draft": tmp_path / "draft"}))


def test_sliding_windows(make_windowed: Callable[[int], Path], tmp_path: Path) -> None:
    """Every second layer of the target, and of its int4 draft, sees 24 tokens."""
    checkpoint = make_windowed(24)
    for weights in ("fp32", "int4"):
        export(checkpoint, tmp_path / weights, uncertified(weights=weights, block_size=8))
    _check_both(Bundles(tmp_path / "fp32", {"draft": tmp_path / "int4"}))


def _check_both(bundles: Bundles) -> None:
    """Both kinds of guesses give what plain decoding of the same target gives."""
    asked = [*asks(False)[30:36], *asks(True)[36:42]]
    config = EngineConfig(kv_memory=MEMORY, threads=1, speculate="off", prefix_cache=False)
    with Engine.open(bundles.target, config) as engine:
        expected = [engine.generate(prompt, params).token_ids for prompt, params in asked]
    for proposer in ("ngram", "draft"):
        with bundles.open(proposer, num_draft_tokens=6, max_sequences=4, max_step_tokens=40) as engine:
            assert at_once(engine, asked) == expected
            engine.check_integrity()
            assert engine.stats().drafted_tokens > 0
            if proposer == "draft":
                assert engine.stats().accepted_tokens > 0
