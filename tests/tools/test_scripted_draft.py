"""The scripted draft: its coin, its cost, and a simulation that is the real process without its model."""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from exporting import uncertified

from pagelet.exporter import export
from pagelet.models.errors import PageletError
from pagelet.runtime import EngineConfig
from pagelet.runtime.speculation import speculator
from pagelet.tools.scripted_draft import Bench, main, measure, table
from pagelet.tools.scripted_simulation import (
    Run,
    Script,
    TimedCosts,
    best_fixed,
    expected_ratio,
    simulate,
)

CONFIG = EngineConfig(threads=1, kv_memory="1MiB", prefix_cache=False, speculate="off")


@pytest.fixture(scope="module")
def bundle(make_llama: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scripted") / "tiny"
    export(make_llama(), folder, uncertified())
    return folder


@pytest.fixture
def bench(bundle: Path) -> Iterator[Bench]:
    made = Bench(bundle, CONFIG, 8, 32)
    with made.engine:
        yield made


class Told(Script):
    """Right at these positions of every prompt."""

    def __init__(self, right: set[int]) -> None:
        super().__init__(0.0)
        self._right = right

    def agrees(self, prompt: int, position: int) -> bool:
        return position in self._right


def test_the_coin() -> None:
    script = Script(0.7)
    tosses = [script.agrees(prompt, position) for prompt in range(4) for position in range(1000)]
    # The seed is fixed, so nothing is left to chance; four standard errors are what chance could do.
    assert sum(tosses) / 4000 == pytest.approx(0.7, abs=4 * math.sqrt(0.7 * 0.3 / 4000))
    assert tosses == [Script(0.7).agrees(prompt, at) for prompt in range(4) for at in range(1000)]
    script.round = 1
    assert tosses != [script.agrees(prompt, at) for prompt in range(4) for at in range(1000)]
    assert not any(Script(0.0).agrees(0, at) for at in range(100))
    assert all(Script(1.0).agrees(0, at) for at in range(100))


def free(rows: int) -> float:
    return 1.0


def by_rows(rows: int) -> float:
    return 1.0 + 0.1 * rows


def test_the_simulation_by_hand() -> None:
    """With the prior of 0.6 the plan is to draft as many as are allowed: 1.96 / 1.5 > 1.6 / 1.25 > 1."""
    # Two steps of three tokens, and one that has no room for candidates.
    assert simulate(Script(1.0), [0], 7, free, 0.25, 2) == Run(4.0, 7, 4, 4)
    # Of two guesses the first is right; token 0 is the prompt's.
    assert simulate(Told({1}), [0], 3, free, 0.25, 2) == Run(2.5, 3, 2, 1)
    # The second guess does not count where the first is wrong.
    assert simulate(Told({2}), [0], 2, free, 0.25, 1) == Run(2.25, 2, 1, 0)
    # Of two sequences: four rows and one step of the draft, then two rows.
    assert simulate(Script(1.0), [0, 1], 3, by_rows, 0.1, 1) == Run(pytest.approx(1.5 + 1.2), 6, 2, 2)


def test_a_draft_that_is_too_slow_is_not_asked() -> None:
    assert simulate(Script(1.0), [0, 1, 2], 10, by_rows, 10.0, 8) == Run(pytest.approx(10 * 1.3), 30, 0, 0)


def test_the_formula_by_hand() -> None:
    assert expected_ratio(0.5, 2, 1, by_rows, 0.2) == pytest.approx(1.75 * 1.1 / (1.3 + 0.4))
    assert expected_ratio(0.5, 1, 4, by_rows, 0.2) == pytest.approx(1.5 * 1.4 / (1.8 + 0.2))
    assert best_fixed(0.0, 1, by_rows, 0.1) == (1.0, 0)
    assert best_fixed(1.0, 1, free, 0.0) == (9.0, 8)
    gain, length = best_fixed(0.7, 1, free, 0.25)
    assert (gain, length) == (pytest.approx(2.19 / 1.5), 2)


@pytest.mark.parametrize("agreement", [0.0, 0.7, 1.0])
def test_the_simulation_does_what_the_engine_does(
    bench: Bench, agreement: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a table of costs that does not change: the same guesses, accepted or not, to the last one."""

    class Fixed(TimedCosts):
        def seconds(self, rows: int) -> float:
            return 0.001 * by_rows(rows)

    bench.engine._loop.speculator.costs = Fixed()
    bench.draft.script, foreseen = Script(agreement), Script(agreement)
    bench.draft.step_seconds = 0.0002
    # A sequence that had bad luck for long is asked less often, which the simulation leaves out.
    monkeypatch.setattr(speculator, "_PATIENCE", 10**9)
    new_tokens = bench.new_tokens = 32 if agreement else 8
    for prompts in ([0], [1, 2, 3], list(range(8))):
        measured, texts = bench.run(prompts, speculate=True)
        simulated = simulate(foreseen, prompts, new_tokens - 1, Fixed().seconds, 0.0002, 48)
        assert (measured.drafted, measured.accepted) == (simulated.drafted, simulated.accepted)
        assert measured.tokens == simulated.tokens == (new_tokens - 1) * len(prompts)
        assert texts == bench.run(prompts, speculate=False)[1]
        assert (measured.accepted == measured.drafted > 0) == (agreement == 1.0)
        assert (measured.accepted > 0) == (agreement > 0)
    assert not bench.draft._outlooks


def test_the_draft_takes_its_time(bundle: Path) -> None:
    bench = Bench(bundle, EngineConfig(threads=1, kv_memory="1MiB", num_draft_tokens=4), 2, 12)
    with bench.engine:
        bench.draft.script, bench.draft.step_seconds = Script(1.0), 0.002
        alone, _ = bench.run([0], speculate=True)
        together, _ = bench.run([0, 1], speculate=True)
    # Eleven tokens after the first: two steps of four guesses, and one with none.
    assert (alone.drafted, together.drafted) == (8, 16)
    assert alone.seconds >= 8 * 0.002
    assert bench.draft.seconds([4, 3]) == 4 * 0.002, "a step of the draft serves all sequences"


def test_the_cost_of_a_step_is_a_median() -> None:
    costs = TimedCosts()
    costs.count(3, 0.5)
    assert costs.median(3) == costs.seconds(3), "one step makes no median"
    for seconds in (0.1, 0.2, 0.3, 9.0):
        costs.count(3, seconds)
    assert costs.median(3) == 0.3
    costs.clear_times()
    assert costs.median(3) == costs.seconds(3)


def test_a_draft_that_fails_is_not_measured(bench: Bench) -> None:
    bench.draft.texts.clear()
    bench.draft.script = Script(1.0)
    with pytest.raises(PageletError, match="the draft failed and was given up: scripted: "):
        bench.run([0], speculate=True)


def test_results_and_their_table(bench: Bench) -> None:
    told: list[str] = []
    results = [
        measure(bench, 0.9, 0.1, count, 2, lambda done, total, name: told.append(f"{done}/{total} {name}"))
        for count in (1, 3)
    ]
    assert told == ["0/2 1 sequences", "1/2 1 sequences", "0/2 3 sequences", "1/2 3 sequences"]
    for result, count in zip(results, (1, 3), strict=True):
        assert result.identical
        assert result.sequences == count
        assert result.ratio.least <= result.ratio.median <= result.ratio.most
        assert min(result.best_fixed, result.bound) >= 1.0
        assert 1.0 <= result.tokens_per_step <= 1.0 + result.drafted_per_step
        assert result.draft_seconds > 0
    assert results[-1].draft_seconds == bench.draft.step_seconds
    lines = table(results).splitlines()
    assert len({line.count("|") for line in lines}) == 1
    assert lines[3].startswith("| 3 | ")
    assert lines[3].endswith("| the same |")


def test_the_whole_command(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [str(bundle), "--sequences", "2", "--repeat", "1", "--new-tokens", "8", "--threads", "1"]
    assert main([*command, "--kv-memory", "1MiB", "--json"]) == 0
    [result] = json.loads(capsys.readouterr().out)["results"]
    assert result["sequences"] == 2
    assert result["identical"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--repeat", "0"], "--repeat is 0; expected 1 to"),
        (["--agreement", "1.5"], "--agreement is 1.5; expected 0 to 1"),
        (["--cost", "nan"], "--cost is nan; expected 0 to"),
        (["--new-tokens", "2"], "--new-tokens is 2; expected 3 to"),
        (["--sequences", "1,x"], "--sequences is '1,x'"),
        (["--sequences", "33"], "expected numbers from 1 to 32"),
        (["--new-tokens", "4096", "--repeat", "1", "--kv-memory", "1MiB"], "has less than 4096 tokens"),
    ],
)
def test_bad_options(
    arguments: list[str], message: str, bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(bundle), "--threads", "1", *arguments]) == 1
    assert message in capsys.readouterr().err
