"""Engines whose proposals are scripted: right, wrong, too long or failing, the text is plain decoding's."""

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_backend import FakeBackend, greedy
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import Guess, ScriptedProposer, greedy_guess, half_right, recorded
from test_engine_threads import Gate, eventually

from pagelet.models.errors import BackendError
from pagelet.models.text import Tokenizer
from pagelet.runtime import Engine, EngineConfig, Request, SamplingParams
from pagelet.runtime.speculation.proposal import Candidate, Proposal
from pagelet.runtime.tasks import Generation

MakeEngine = Callable[..., tuple[Engine, FakeBackend]]
MakeSpeculating = Callable[..., tuple[Engine, ScriptedProposer]]
VOCAB = 258


def wrong(tokens: list[int], limit: int) -> list[int]:
    return [(token + 1) % VOCAB for token in greedy(tokens, limit, VOCAB)]


def at_random(tokens: list[int], limit: int) -> list[int]:
    rng = np.random.default_rng(len(tokens))
    guessed: list[int] = rng.integers(0, VOCAB, int(rng.integers(0, limit + 1))).tolist()
    return guessed


GUESSES: dict[str, Guess] = {
    "right": greedy_guess(VOCAB),
    "wrong": wrong,
    "half right": half_right(greedy_guess(VOCAB)),
    "random": at_random,
    "none": lambda tokens, limit: [],
}


def prompt_of(length: int, seed: int = 0) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(2, VOCAB, length).tolist()
    return tokens


def params(max_tokens: int = 24, **others: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **others)


@pytest.mark.parametrize("name", GUESSES)
@pytest.mark.parametrize("windows", [(0,), (12,), (0, 12)])
def test_tokens_are_the_oracles(
    make_speculating: MakeSpeculating, windows: tuple[int, ...], name: str
) -> None:
    for num_draft_tokens in (0, 1, 3, 16, 64):
        engine, proposer = make_speculating(
            GUESSES[name], {"windows": windows}, num_draft_tokens=num_draft_tokens
        )
        prompts = [prompt_of(length, length) for length in (1, 7, 32)]
        done = engine.generate_all(prompts, params())
        for prompt, completion in zip(prompts, done, strict=True):
            assert list(completion.token_ids) == greedy(prompt, 24, VOCAB, windows)
        engine.check_integrity()
        stats = engine.stats()
        assert stats.blocks_used == 0
        assert stats.drafted_tokens == sum(completion.usage.drafted_tokens for completion in done)
        assert stats.accepted_tokens == sum(completion.usage.accepted_tokens for completion in done)
        assert stats.drafted_tokens == sum(proposed for proposed, _ in proposer.observed)
        assert stats.accepted_tokens == sum(accepted for _, accepted in proposer.observed)
        assert (stats.drafted_tokens > 0) == (num_draft_tokens > 0 and name != "none")
        if windows == (0,) and num_draft_tokens:  # the guesses do not know of windows
            assert (stats.accepted_tokens > 0) == (name in ("right", "half right"))
        assert len(proposer.forgotten) == 3


def test_right_proposals_are_all_accepted_in_as_few_steps_as_can_be(
    make_speculating: MakeSpeculating,
) -> None:
    engine, proposer = make_speculating(greedy_guess(VOCAB), num_draft_tokens=4)
    done = engine.generate(prompt_of(9), params(22))
    # The prompt's step gives a token, the others five each, and the last one is bounded by max_tokens.
    assert proposer.observed == [(4, 4)] * 4
    stats = engine.stats()
    assert stats.steps == 1 + 4 + 1
    assert (done.usage.drafted_tokens, done.usage.accepted_tokens) == (16, 16)
    assert stats.acceptance_rate == 1.0
    assert stats.tokens_per_step == pytest.approx(21 / 5)
    assert stats.decode_tokens == 5
    assert stats.reruns == 0
    assert stats.speculation_failure is None


@pytest.mark.parametrize("max_tokens", range(1, 9))
def test_max_tokens_ends_within_a_proposal(make_speculating: MakeSpeculating, max_tokens: int) -> None:
    engine, _ = make_speculating(greedy_guess(VOCAB), num_draft_tokens=16)
    done = engine.generate(prompt_of(5), params(max_tokens))
    assert list(done.token_ids) == greedy(prompt_of(5), max_tokens, VOCAB)
    assert done.finish_reason == "length"
    assert done.usage.accepted_tokens == max(0, max_tokens - 2), "a candidate that could not become text"
    engine.check_integrity()


class OverlongProposer(ScriptedProposer):
    """Does not care for the limit, neither in what it could propose nor in what it does."""

    def __init__(self, guess: Guess, in_outlook: bool) -> None:
        super().__init__(guess)
        self._in_outlook = in_outlook

    def outlook(self, sequence: Generation, limit: int) -> Proposal:
        if not self._in_outlook:
            return super().outlook(sequence, limit)
        return [Candidate(token, i - 1, 0.9) for i, token in enumerate(self._guess(sequence.tokens, 40))]

    def fill(self, proposals: Sequence[tuple[Generation, Proposal]]) -> list[Proposal]:
        if self._in_outlook:
            return super().fill(proposals)
        return [
            [Candidate(token, i - 1, 0.9) for i, token in enumerate(self._guess(sequence.tokens, 40))]
            for sequence, _ in proposals
        ]


@pytest.mark.parametrize("in_outlook", [True, False])
@pytest.mark.parametrize("guess", [greedy_guess(VOCAB), wrong])
def test_proposals_beyond_the_limit_are_cut(
    make_speculating: MakeSpeculating, guess: Guess, in_outlook: bool
) -> None:
    overlong = OverlongProposer(guess, in_outlook)
    engine, proposer = make_speculating(overlong, {"max_context": 48}, num_draft_tokens=3)
    done = engine.generate(prompt_of(20), params(28))
    assert list(done.token_ids) == greedy(prompt_of(20), 28, VOCAB)
    assert max(proposed for proposed, _ in proposer.observed) == 3
    engine.check_integrity()


ASKED = {
    "greedy": params(),
    "logprobs": params(logprobs=3),
    "sampled": params(temperature=0.8, top_p=0.9, seed=3, logprobs=0),
    "filtered": params(temperature=1.2, top_k=20, min_p=0.01, seed=4),
    "penalized": params(temperature=0.7, seed=5, repetition_penalty=1.3, frequency_penalty=0.4),
    "greedy, penalized": params(repetition_penalty=1.5, presence_penalty=0.5),
    "biased": params(logit_bias={7: 4.0, 9: -100.0}),
    "samples": params(temperature=1.0, seed=6, n=3),
}


@pytest.mark.parametrize("name", ASKED)
def test_whatever_is_asked_the_choices_are_those_of_plain_decoding(
    make_engine: MakeEngine, make_speculating: MakeSpeculating, name: str
) -> None:
    plain, _ = make_engine(speculate="off")
    prompts = [prompt_of(length, length) for length in (3, 14)]
    expected = [plain.generate(prompt, ASKED[name]).choices for prompt in prompts]
    texts = [
        [*prompt, *choice.token_ids]
        for prompt, choices in zip(prompts, expected, strict=True)
        for choice in choices
    ]
    for guess in (recorded(texts), half_right(recorded(texts))):
        engine, _ = make_speculating(guess, num_draft_tokens=5)
        done = engine.generate_all(prompts, ASKED[name])
        assert [completion.choices for completion in done] == expected
        assert engine.stats().accepted_tokens > 0
        engine.check_integrity()


@pytest.mark.parametrize("place", range(2, 12))
def test_a_stop_within_a_proposal_ends_the_text_there_and_the_cache_with_it(
    make_engine: MakeEngine, make_speculating: MakeSpeculating, tokenizer: Tokenizer, place: int
) -> None:
    prompt = prompt_of(10)
    tokens = greedy(prompt, 24, VOCAB)
    plain, _ = make_engine(speculate="off")
    engine, _ = make_speculating(greedy_guess(VOCAB), num_draft_tokens=6)
    whole = plain.generate(prompt, params()).text
    for asked in (
        params(stop_token_ids=[tokens[place]]),
        params(stop=[whole[place // 2 : place // 2 + 2]]),
        params(stop=[whole[place], "never"], logprobs=1),
    ):
        done = engine.generate(prompt, asked)
        assert done.choices == plain.generate(prompt, asked).choices
        assert done.finish_reason == "stop"
        engine.check_integrity()
        # What was verified behind the stop was not the text's, and must not be found by who says it.
        for beyond in ([*prompt, *done.token_ids], [*prompt, *tokens[:-1]]):
            other = [*beyond, 77]
            follow = engine.generate(other, params(6))
            assert list(follow.token_ids) == greedy(other, 6, VOCAB)
            engine.check_integrity()


def test_only_text_is_found_in_the_prefix_cache(make_speculating: MakeSpeculating) -> None:
    engine, _ = make_speculating(greedy_guess(VOCAB), num_draft_tokens=16)
    prompt = prompt_of(6)
    tokens = greedy(prompt, 24, VOCAB)
    stopped = engine.generate(prompt, params(stop_token_ids=[tokens[3]]))
    again = engine.generate([*prompt, *tokens], params(4))
    # The last token of the text was drawn, not read.
    text = len(prompt) + len(stopped.token_ids) - 1
    assert again.usage.cached_tokens == text // 4 * 4


def test_chunks_of_several_tokens_make_up_the_text(make_speculating: MakeSpeculating) -> None:
    for stop in ([], ["\x01"], ["ab", "zq"]):
        engine, _ = make_speculating(half_right(greedy_guess(VOCAB)), num_draft_tokens=6)
        request = engine.submit(prompt_of(12), params(40, stop=stop, logprobs=1))
        chunks = list(request)
        done = request.result()
        assert "".join(chunk.text for chunk in chunks) == done.text
        assert tuple(token for chunk in chunks for token in chunk.token_ids) == done.token_ids
        assert tuple(entry for chunk in chunks for entry in chunk.logprobs or ()) == done.logprobs
        assert all(len(chunk.logprobs or ()) == len(chunk.token_ids) for chunk in chunks)
        assert any(len(chunk.token_ids) > 1 for chunk in chunks)
        assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)


def test_a_request_can_go_without(make_speculating: MakeSpeculating) -> None:
    engine, proposer = make_speculating(greedy_guess(VOCAB))
    done = engine.generate(prompt_of(8), params(), speculate=False)
    assert list(done.token_ids) == greedy(prompt_of(8), 24, VOCAB)
    assert (done.usage.drafted_tokens, engine.stats().drafted_tokens, proposer.observed) == (0, 0, [])
    beside = engine.submit(prompt_of(8, 1), params(), speculate=False)
    assert engine.generate(prompt_of(8, 2), params()).usage.drafted_tokens > 0
    assert beside.result().usage.drafted_tokens == 0


class FailingProposer(ScriptedProposer):
    """Works twice."""

    def fill(self, proposals: Sequence[tuple[Generation, Proposal]]) -> list[Proposal]:
        if len(self.observed) == 2:
            raise BackendError("the guess broke")
        return super().fill(proposals)


def test_a_proposer_that_fails_is_given_up_and_the_text_goes_on(make_speculating: MakeSpeculating) -> None:
    engine, proposer = make_speculating(FailingProposer(greedy_guess(VOCAB)), num_draft_tokens=3)
    for seed in range(2):
        done = engine.generate(prompt_of(8, seed), params())
        assert list(done.token_ids) == greedy(prompt_of(8, seed), 24, VOCAB)
        assert done.usage.drafted_tokens == (0 if seed else 6)
    assert proposer.closed
    assert engine.stats().speculation_failure == "scripted: the guess broke"
    assert engine.stats().failed_steps == 0
    engine.check_integrity()


def test_a_step_that_fails_leaves_no_proposal_behind(make_speculating: MakeSpeculating) -> None:
    failures = [BackendError("this step broke")]

    def before_run(batch: Any) -> None:
        if len(batch.input_ids) == 5 and failures:
            raise failures.pop()

    engine, _ = make_speculating(greedy_guess(VOCAB), {"before_run": before_run})
    with pytest.raises(BackendError, match="this step broke"):
        engine.generate(prompt_of(8), params())
    engine.check_integrity()
    assert list(engine.generate(prompt_of(8), params()).token_ids) == greedy(prompt_of(8), 24, VOCAB)


def test_a_fork_of_a_speculating_request(make_speculating: MakeSpeculating) -> None:
    gate = Gate()
    engine, _ = make_speculating(half_right(greedy_guess(VOCAB)), {"before_run": gate})
    request = engine.submit(prompt_of(11), params(40))
    gate.let(5)
    forks = [engine.fork(request, params(12)) for _ in range(2)]
    gate.open()
    for fork in forks:
        assert len(fork.prompt_ids) > 11 + 5
        assert list(fork.result(timeout=10).token_ids) == greedy(fork.prompt_ids, 12, VOCAB)
    assert list(request.result(timeout=10).token_ids) == greedy(prompt_of(11), 40, VOCAB)
    engine.check_integrity()


@pytest.mark.parametrize("windows", [(0,), (0, 12)])
def test_a_session_of_a_speculating_request_resumes(
    make_speculating: MakeSpeculating, tmp_path: Path, windows: tuple[int, ...]
) -> None:
    gate = Gate()
    guess = half_right(greedy_guess(VOCAB, windows))
    engine, _ = make_speculating(guess, {"before_run": gate, "windows": windows})
    request = engine.submit(prompt_of(18), params(60))
    gate.let(5)
    saving = threading.Thread(target=engine.save_session, args=(tmp_path / "saved", request))
    saving.start()
    eventually(lambda: bool(engine._loop._calls._waiting) or not saving.is_alive())
    gate.open()
    saving.join(timeout=10)
    expected = greedy(prompt_of(18), 60, VOCAB, windows)
    assert list(request.result(timeout=10).token_ids) == expected
    after, _ = make_speculating(guess, {"windows": windows})
    session = after.load_session(tmp_path / "saved")
    assert session.restored_tokens > 0
    rest = after.resume(session).result(timeout=10)
    assert [*session.token_ids[18:], *rest.token_ids] == expected
    assert rest.usage.accepted_tokens > 0
    after.check_integrity()


@pytest.mark.parametrize("how", ["cancelled", "timeout"])
def test_ended_from_outside(make_speculating: MakeSpeculating, how: str) -> None:
    gate = Gate()
    engine, proposer = make_speculating(half_right(greedy_guess(VOCAB)), {"before_run": gate})
    request = engine.submit(prompt_of(8), params(100), timeout=0.2 if how == "timeout" else None)
    gate.let(6)
    if how == "cancelled":
        request.cancel()
    else:
        eventually(lambda: request.deadline < time.monotonic())
    gate.open()
    done = request.result(timeout=10)
    assert done.finish_reason == how
    assert 6 < len(done.token_ids) < 100
    assert list(done.token_ids) == greedy(prompt_of(8), len(done.token_ids), VOCAB)
    eventually(lambda: engine.stats().blocks_used == 0)
    engine.check_integrity()
    assert len(proposer.forgotten) == 1


def _together(engine: Engine, asked: Sequence[tuple[list[int], SamplingParams]]) -> list[Request]:
    """Requests that arrive between two steps."""
    return engine._loop.call(lambda: [engine.submit(prompt, asks) for prompt, asks in asked])


def test_no_sequence_is_preempted_for_a_proposal(make_speculating: MakeSpeculating) -> None:
    """One text stops before the other needs its blocks: the texts fit, their proposals do not always."""
    long, short = prompt_of(8, 0), prompt_of(8, 1)
    stopped = greedy(short, 8, VOCAB)
    drafted = []
    for num_blocks in (12, 200):  # 48 tokens of the one; 16 of both before
        backend = FakeBackend(num_blocks=num_blocks, vocab_size=VOCAB)
        engine, _ = make_speculating(wrong, backend=backend, num_draft_tokens=16)
        asked = ((long, params(40)), (short, params(40, stop_token_ids=stopped[-1:])))
        first, second = _together(engine, asked)
        assert list(first.result(timeout=10).token_ids) == greedy(long, 40, VOCAB)
        assert list(second.result(timeout=10).token_ids) == stopped
        assert engine.stats().preemptions == 0
        drafted.append(engine.stats().drafted_tokens)
        engine.check_integrity()
    assert 0 < drafted[0] < drafted[1]


@pytest.mark.parametrize("name", ["right", "wrong", "half right"])
def test_under_pressure_the_text_is_the_same(make_speculating: MakeSpeculating, name: str) -> None:
    engine, proposer = make_speculating(
        GUESSES[name], {"num_blocks": 14}, max_sequences=6, max_step_tokens=12, num_draft_tokens=7
    )
    prompts = [prompt_of(9 + index, index) for index in range(8)]
    for prompt, done in zip(prompts, engine.generate_all(prompts, params(30)), strict=True):
        assert list(done.token_ids) == greedy(prompt, 30, VOCAB)
    stats = engine.stats()
    assert stats.preemptions > 0
    assert stats.drafted_tokens > 0
    assert len(proposer.forgotten) == len(prompts) + stats.preemptions
    engine.check_integrity()


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=5),
    windows=st.sampled_from([(0,), (5,), (0, 12), (3, 0)]),
    block_size=st.sampled_from([1, 2, 4, 8]),
    spare_tokens=st.integers(0, 60),
    num_draft_tokens=st.none() | st.integers(0, 20),
    max_sequences=st.integers(1, 4),
    max_step_tokens=st.integers(4, 40),
    max_tokens=st.integers(1, 20),
    prefix_cache=st.booleans(),
    script=st.lists(st.integers(0, 8), min_size=1, max_size=12),
)
def test_any_script_gives_the_oracles_tokens(
    tokenizer: Tokenizer,
    lengths: list[int],
    windows: tuple[int, ...],
    block_size: int,
    spare_tokens: int,
    num_draft_tokens: int | None,
    max_sequences: int,
    max_step_tokens: int,
    max_tokens: int,
    prefix_cache: bool,
    script: list[int],
) -> None:
    """Entry i of `script` says how many tokens of a guess are right at texts of such a length."""

    def guess(tokens: list[int], limit: int) -> list[int]:
        num_right = script[len(tokens) % len(script)]
        right = greedy(tokens, limit, VOCAB, windows)
        return right[:num_right] + [(token + 1) % VOCAB for token in right[num_right:]]

    num_blocks = -(-(max(lengths) + max_tokens + max_step_tokens + spare_tokens) // block_size)
    backend = FakeBackend(num_blocks=num_blocks, block_size=block_size, vocab_size=VOCAB, windows=windows)
    config = EngineConfig(
        max_sequences=max_sequences,
        max_step_tokens=max_step_tokens,
        num_draft_tokens=num_draft_tokens,
        prefix_cache=prefix_cache,
    )
    with Engine(backend, tokenizer, config, proposers=[ScriptedProposer(guess)]) as engine:
        prompts = [prompt_of(length, index % 2) for index, length in enumerate(lengths)]
        requests = [engine.submit(prompt, params(max_tokens)) for prompt in prompts]
        for prompt, request in zip(prompts, requests, strict=True):
            assert list(request.result(timeout=30).token_ids) == greedy(prompt, max_tokens, VOCAB, windows)
            engine.check_integrity()
        assert engine.stats().blocks_used == 0


def test_guesses_do_not_keep_a_newcomer_waiting(make_speculating: MakeSpeculating) -> None:
    """A proposal of 48 would take the blocks that the newcomer's prompt needs, in every step."""
    gate = Gate()
    right = greedy_guess(VOCAB)

    def first_is_right(tokens: list[int], limit: int) -> list[int]:
        return right(tokens, 1) + [7] * (limit - 1)

    model = {"before_run": gate, "num_blocks": 28}
    engine, _ = make_speculating(first_is_right, model, num_draft_tokens=48, prefix_cache=False)
    first = engine.submit(prompt_of(4), params(100))
    gate.let(3)
    second = engine.submit(prompt_of(68, seed=1), params(4))
    gate.let(3)
    eventually(lambda: any(len(sample.tokens) > 68 for sample in second.samples))
    gate.open()
    assert list(second.result(timeout=10).token_ids) == greedy(prompt_of(68, seed=1), 4, VOCAB)
    assert list(first.result(timeout=10).token_ids) == greedy(prompt_of(4), 100, VOCAB)
    assert first.result().usage.accepted_tokens > 30
