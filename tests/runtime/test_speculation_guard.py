"""Proposers that misbehave: given up, said so, and the text is what it would have been."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from fake_backend import FakeBackend, greedy
from scripted import ScriptedProposer, greedy_guess

from pagelet.models.errors import InputError
from pagelet.models.text import Tokenizer
from pagelet.runtime import Engine, SamplingParams
from pagelet.runtime.speculation.proposal import Candidate, Proposal
from pagelet.runtime.speculation.proposer import Proposer
from pagelet.runtime.tasks import Generation

VOCAB = 258
MakeSpeculating = Callable[..., tuple[Engine, ScriptedProposer]]


def check(make: Callable[..., Any], proposer: Proposer, failure: str) -> None:
    engine, _ = make(proposer, num_draft_tokens=None, prefix_cache=False)
    for seed in range(2):
        prompt = [5 * index % 250 + 2 + seed for index in range(9)]
        done = engine.generate(prompt, SamplingParams(max_tokens=24, ignore_eos=True))
        assert list(done.token_ids) == greedy(prompt, 24, VOCAB)
    found = engine.stats().speculation_failure
    assert found is not None
    assert failure in found
    engine.check_integrity()


@pytest.mark.parametrize("kind", [RuntimeError, SystemExit])
@pytest.mark.parametrize("method", ["outlook", "seconds", "fill", "observe", "forget"])
def test_every_method_may_raise(
    make_speculating: MakeSpeculating,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    kind: type[BaseException],
) -> None:
    proposer = ScriptedProposer(greedy_guess(VOCAB))

    def fail(*_: Any) -> Any:
        raise kind(f"{method} broke")

    monkeypatch.setattr(proposer, method, fail)
    check(make_speculating, proposer, f"scripted: {kind.__name__}('{method} broke')")
    assert proposer.closed


def test_an_engine_closes_whatever_its_proposer_does(
    make_speculating: MakeSpeculating, monkeypatch: pytest.MonkeyPatch
) -> None:
    proposer = ScriptedProposer(greedy_guess(VOCAB))
    monkeypatch.setattr(proposer, "close", lambda: 1 / 0)
    engine, _ = make_speculating(proposer)
    engine.close()
    assert engine._loop.backend.closed  # type: ignore[attr-defined]


def test_what_is_no_proposer_is_refused(tokenizer: Tokenizer) -> None:
    for wrong in ("ngram", None, object()):
        with pytest.raises(InputError, match="expected objects of classes made from Proposer"):
            Engine(FakeBackend(vocab_size=VOCAB), tokenizer, proposers=[wrong])  # type: ignore[list-item]


def test_a_tree_for_a_target_that_verifies_chains(make_speculating: MakeSpeculating) -> None:
    """Its first candidate for each place is taken, wherever the tree turns up."""

    class Branching(ScriptedProposer):
        def fill(self, proposals: Sequence[tuple[Generation, Proposal]]) -> list[Proposal]:
            return [[candidate._replace(parent=-1) for candidate in outlook] for _, outlook in proposals]

    engine, _ = make_speculating(Branching(greedy_guess(VOCAB)), prefix_cache=False)
    prompt = [5 * index % 250 + 2 for index in range(9)]
    done = engine.generate(prompt, SamplingParams(max_tokens=24, ignore_eos=True))
    assert list(done.token_ids) == greedy(prompt, 24, VOCAB)
    assert engine.stats().speculation_failure is None
    assert done.usage.accepted_tokens == done.usage.drafted_tokens > 5


def test_closing_may_raise_too(make_speculating: MakeSpeculating, monkeypatch: pytest.MonkeyPatch) -> None:
    proposer = ScriptedProposer(greedy_guess(VOCAB))

    def fail(*_: Any) -> Any:
        raise RuntimeError("broke")

    monkeypatch.setattr(proposer, "fill", fail)
    monkeypatch.setattr(proposer, "close", fail)
    check(make_speculating, proposer, "scripted: RuntimeError('broke'); closing it: RuntimeError('broke')")


@pytest.mark.parametrize(
    "candidate",
    [
        Candidate(-1, -1, 0.9),
        Candidate(VOCAB, -1, 0.9),
        Candidate(None, -1, 0.9),
        Candidate(5, 0, 0.9),
        Candidate(5, -2, 0.9),
        Candidate(5, -1, math.nan),
        Candidate(5, -1, 1.5),
        Candidate(5, -1, -0.1),
        Candidate("5", -1, 0.5),  # type: ignore[arg-type]
        (5, -1),
        None,
    ],
)
def test_what_is_no_candidate_ends_the_proposer(make_speculating: MakeSpeculating, candidate: Any) -> None:
    class Wrong(ScriptedProposer):
        def outlook(self, sequence: Generation, limit: int) -> Proposal:
            return [candidate]

    check(make_speculating, Wrong(greedy_guess(VOCAB)), "scripted: ")


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1.0, None])
def test_times_that_are_none(make_speculating: MakeSpeculating, seconds: Any) -> None:
    class Wrong(ScriptedProposer):
        def seconds(self, lengths: Sequence[int]) -> float:
            return seconds  # type: ignore[no-any-return]

    check(make_speculating, Wrong(greedy_guess(VOCAB)), "scripted: ")


def test_too_few_proposals(make_speculating: MakeSpeculating) -> None:
    class Wrong(ScriptedProposer):
        def fill(self, proposals: Sequence[tuple[Generation, Proposal]]) -> list[Proposal]:
            return []

    check(make_speculating, Wrong(greedy_guess(VOCAB)), "0 proposals for 1 sequences")
