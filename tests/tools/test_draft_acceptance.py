"""Three rules of acceptance, against brute force, an exact formula and models that are equal."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from exporting import uncertified
from hypothesis import given
from hypothesis import strategies as st

from pagelet.exporter import export
from pagelet.models.errors import InputError
from pagelet.runtime import Engine, EngineConfig, SamplingParams
from pagelet.tools.draft_acceptance import (
    Estimate,
    Probabilities,
    agreement,
    main,
    measure,
    overlap,
    probabilities,
    table,
)

SAMPLED = SamplingParams(temperature=1.0)
weights = st.lists(st.floats(0.01, 1.0), min_size=5, max_size=5).map(lambda w: np.array(w) / sum(w))


@pytest.fixture(scope="module")
def bundles(make_llama: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A target, and drafts with its tokenizer: another model, and one with a smaller vocabulary."""
    folder = tmp_path_factory.mktemp("acceptance")
    # Less wide than the default, or two random models would hardly ever agree.
    options = {"target": {}, "other": {"seed": 1}, "smaller": {"seed": 2, "vocab_size": 288}}
    for name, changed in options.items():
        export(make_llama(**({"initializer_range": 0.1} | changed)), folder / name, uncertified())
    return {name: folder / name for name in options}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("The tide comes in twice a day, and twice a day it leaves. " * 2)
    return path


@given(weights, weights)
def test_overlap_is_what_rejection_accepts(p: Probabilities, q: Probabilities) -> None:
    accepted = sum(q[token] * min(1.0, p[token] / q[token]) for token in range(5))
    assert overlap(p, q) == pytest.approx(accepted, rel=1e-12)  # rounding of five terms
    assert overlap(p, p) == pytest.approx(1.0, rel=1e-12)


def both_draw_the_same(p: Probabilities, q: Probabilities) -> float:
    """Exactly: token i is first in both races if E_j ≥ E_i max(p_j/p_i, q_j/q_i) for all j, E ~ Exp(1)."""
    return sum(1.0 / sum(max(a / p[i], b / q[i]) for a, b in zip(p, q, strict=True)) for i in range(p.size))


@given(weights, weights)
def test_shared_noise_accepts_no_more_than_rejection(p: Probabilities, q: Probabilities) -> None:
    share, distance = both_draw_the_same(p, q), 1.0 - overlap(p, q)
    # Both bounds are reached by equal distributions, up to rounding.
    assert (1 - distance) / (1 + distance) - 1e-12 <= share <= 1 - distance + 1e-12


@pytest.mark.parametrize("seed", range(3))
def test_agreement_is_the_probability_that_both_draw_the_same(seed: int) -> None:
    rng = np.random.default_rng(seed)
    target, draft = (rng.normal(size=8).astype(np.float32) for _ in range(2))
    exact = both_draw_the_same(probabilities(target, SAMPLED), probabilities(draft, SAMPLED))
    draws = 3000
    error = math.sqrt(exact * (1 - exact) / draws)
    # The seeds are fixed, so nothing is left to chance; four standard errors are what chance could do.
    assert agreement(target, draft, SAMPLED, 7, draws) == pytest.approx(exact, abs=4 * error)


def test_equal_models_always_agree() -> None:
    logits = np.random.default_rng(0).normal(size=300).astype(np.float32)
    for params in (SAMPLED, SamplingParams(temperature=2.0, top_p=0.9)):
        assert agreement(logits, logits, params, 0, 50) == 1.0


def test_probabilities_are_the_samplers() -> None:
    logits = np.log(np.float32([0.5, 0.3, 0.15, 0.05]))
    # float32 logarithms
    np.testing.assert_allclose(probabilities(logits, SAMPLED), [0.5, 0.3, 0.15, 0.05], rtol=1e-6)
    cut = probabilities(logits, SamplingParams(temperature=1.0, top_p=0.75))
    np.testing.assert_allclose(cut, [0.625, 0.375, 0, 0], rtol=1e-6)
    flat = probabilities(2 * logits, SamplingParams(temperature=2.0))
    np.testing.assert_allclose(flat, [0.5, 0.3, 0.15, 0.05], rtol=1e-6)
    lacking = probabilities(np.float32([0.0, -np.inf]), SAMPLED)
    assert lacking.tolist() == [1.0, 0.0]


def test_an_estimate_by_hand() -> None:
    assert Estimate.of(np.array([0.0, 1.0])) == Estimate(0.5, pytest.approx(0.5))


def test_a_model_as_its_own_draft(bundles: dict[str, Path]) -> None:
    config = EngineConfig(threads=1, kv_memory="1MiB")
    with Engine.open(bundles["target"], config) as one, Engine.open(bundles["target"], config) as two:
        result = measure(one, two, [[5, 6, 7, 8], [9, 10]], SAMPLED, 4)
        with pytest.raises(InputError, match="nothing to compare"):
            measure(one, two, [], SAMPLED, 4)
    assert result.positions == 6
    assert result.shared_noise == result.greedy == Estimate(1.0, 0.0)
    assert result.rejection.mean == pytest.approx(1.0, rel=1e-12)  # sums to 1 up to rounding
    lines = table(result).splitlines()
    assert len({line.count("|") for line in lines}) == 1
    assert lines[2] == "| shared noise (the runtime's rule) | 1.0000 | 0.0000 |"


@pytest.mark.parametrize("draft", ["other", "smaller"])
def test_the_whole_command(
    draft: str, bundles: dict[str, Path], text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [str(bundles["target"]), str(bundles[draft]), "--text", str(text), "--threads", "1"]
    assert main([*command, "--max-tokens", "60", "--seeds", "8", "--kv-memory", "1MiB", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["positions"] == 60
    shared, rejection, gain = (result[name]["mean"] for name in ("shared_noise", "rejection", "gain"))
    assert 0 < shared < 1
    assert 0 < rejection < 1
    assert gain == pytest.approx(rejection - shared)
    assert shared < rejection + 4 * result["gain"]["standard_error"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seeds", "0"], "--seeds is 0; expected 1 to"),
        (["--max-tokens", "0"], "--max-tokens is 0; expected 1 to"),
        (["--max-tokens", "1"], "nothing to compare"),
        (["--temperature", "0"], "expected a number above 0"),
        (["--top-p", "1.5"], "top_p is 1.5"),
        (["--text", "no/file"], "cannot read no/file"),
    ],
)
def test_bad_options(
    arguments: list[str],
    message: str,
    bundles: dict[str, Path],
    text: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pair = [str(bundles["target"]), str(bundles["other"]), "--text", str(text), "--kv-memory", "1MiB"]
    assert main([*pair, *arguments]) == 1
    assert message in capsys.readouterr().err


def test_a_draft_that_does_not_fit(
    bundles: dict[str, Path], text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(bundles["smaller"]), str(bundles["target"]), "--text", str(text)]) == 1
    assert "use a draft of the same family" in capsys.readouterr().err
