"""Conversations that outgrow the context: refused, or cut at turns, and never in silence."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fake_backend import FakeBackend, greedy
from hypothesis import given, settings
from hypothesis import strategies as st

from pagelet.models.errors import InputError, PromptTooLongError
from pagelet.models.manifest import TextSettings
from pagelet.models.text import ChatTemplate, Tokenizer
from pagelet.runtime import Engine, EngineConfig, SamplingParams
from pagelet.runtime.prompts import LengthLimits
from pagelet.runtime.truncation import encode_truncated

Messages = list[dict[str, Any]]
# Every character is one token, so a rendered conversation's length is its tokens.
TEMPLATE = "{% for m in messages %}[{{ m.role }}:{{ m.content or '' }}]{% endfor %}>"
CONTEXT = 128


@pytest.fixture(scope="module")
def chatting(tokenizer: Tokenizer) -> Tokenizer:
    return Tokenizer(tokenizer._tokenizer, TextSettings(), ChatTemplate(TEMPLATE))


@pytest.fixture
def engine(chatting: Tokenizer) -> Iterator[Engine]:
    backend = FakeBackend(vocab_size=chatting.vocab_size, max_context=CONTEXT)
    with Engine(backend, chatting, EngineConfig()) as engine:
        yield engine


def message(role: str, length: int) -> dict[str, str]:
    """A message that takes `length` tokens in all."""
    return {"role": role, "content": "x" * (length - len(f"[{role}:]"))}


def params(max_tokens: int | None = 8) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


CONVERSATION = [
    message("system", 20),
    *(message(role, 20) for _ in range(3) for role in ("user", "assistant")),
    message("user", 15),
]


def test_the_oldest_turns_go_and_the_system_prompt_stays(engine: Engine) -> None:
    with pytest.raises(PromptTooLongError, match="156 tokens and the context 128"):
        engine.generate(CONVERSATION, params())
    done = engine.generate(CONVERSATION, params(), on_context_full="truncate")
    assert (done.dropped_messages, done.usage.prompt_tokens) == (2, 116)
    assert done.to_json()["dropped_messages"] == 2
    kept = [CONVERSATION[0], *CONVERSATION[3:]]
    ids = engine.tokenizer.encode_chat(kept)
    assert list(done.token_ids) == greedy(ids, 8, engine.vocab_size)
    assert engine.generate(kept, params(), on_context_full="truncate").dropped_messages == 0


def test_room_for_the_reply(engine: Engine) -> None:
    for max_tokens, dropped in ((12, 2), (13, 4), (None, 4), (52, 4), (53, 6), (92, 6)):
        request = engine.submit(CONVERSATION, params(max_tokens), on_context_full="truncate")
        assert request.dropped_messages == dropped
        done = request.result(timeout=10)
        room = CONTEXT - done.usage.prompt_tokens
        assert done.usage.completion_tokens == (room if max_tokens is None else max_tokens)
        assert room >= (CONTEXT // 8 if max_tokens is None else max_tokens)
    with pytest.raises(PromptTooLongError, match=r"have 36 tokens .* room for 93, but the context has 128"):
        engine.submit(CONVERSATION, params(93), on_context_full="truncate")
    long = [message("system", 60), message("user", 80)]
    with pytest.raises(PromptTooLongError, match=r"have 141 tokens .* room for 16, but the context has 128"):
        engine.submit(long, on_context_full="truncate")


def test_a_small_cache_is_the_limit_too(chatting: Tokenizer) -> None:
    backend = FakeBackend(vocab_size=chatting.vocab_size, max_context=CONTEXT, num_blocks=20)
    with Engine(backend, chatting) as engine:
        done = engine.generate(CONVERSATION, params(5), on_context_full="truncate")
        assert (done.dropped_messages, done.usage.prompt_tokens) == (4, 76)


def test_only_messages_can_be_dropped_and_options_are_checked(engine: Engine) -> None:
    for prompt in ("text", [5, 6], []):
        with pytest.raises(InputError, match="not a list of messages"):
            engine.generate(prompt, params(), on_context_full="truncate")
    with pytest.raises(InputError, match="expected 'refuse' or 'truncate'"):
        engine.generate(CONVERSATION, params(), on_context_full="drop")  # type: ignore[arg-type]


def test_streams_drop_too(engine: Engine) -> None:
    whole = engine.generate(CONVERSATION, params(), on_context_full="truncate")
    stream = engine.stream(CONVERSATION, params(), on_context_full="truncate")
    assert stream.request.dropped_messages == 2
    assert tuple(token for chunk in stream for token in chunk.token_ids) == whole.token_ids

    async def collect() -> list[int]:
        chunks = engine.astream(CONVERSATION, params(), on_context_full="truncate")
        return [token async for chunk in chunks for token in chunk.token_ids]

    assert tuple(asyncio.run(collect())) == whole.token_ids


ROLES = ["user", "user", "assistant", "tool", "assistant"]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from(["system", "developer"]), max_size=2),
    st.lists(st.tuples(st.sampled_from(ROLES), st.integers(0, 60)), min_size=1, max_size=12),
    st.integers(1, 200),
    st.none() | st.integers(1, 100),
)
def test_as_few_turns_as_possible_are_dropped(
    chatting: Tokenizer, system: list[str], rest: list[tuple[str, int]], context: int, max_tokens: int | None
) -> None:
    messages: Messages = [{"role": role, "content": "be brief"} for role in system]
    messages += [{"role": role, "content": "x" * length} for role, length in rest]
    reserve = max(1, context // 8) if max_tokens is None else max_tokens
    # The oracle tries every place where a user's message follows something that is not the system prompt.
    cuts = [0, *(i for i in range(1, len(rest)) if rest[i][0] == "user")]
    first = next((i for i, (role, _) in enumerate(rest) if role == "user"), 0)
    cuts = [cut for cut in cuts if cut != first or not cut]
    rendered = {
        cut: chatting.encode_chat([*messages[: len(system)], *messages[len(system) + cut :]]) for cut in cuts
    }
    fitting = [cut for cut in cuts if len(rendered[cut]) + reserve <= context]
    limits = LengthLimits(context, 1000)
    if not fitting:
        with pytest.raises(PromptTooLongError):
            encode_truncated(messages, chatting, chatting.vocab_size, limits, max_tokens)
        return
    found = encode_truncated(messages, chatting, chatting.vocab_size, limits, max_tokens)
    assert (found.dropped_messages, found.token_ids) == (fitting[0], rendered[fitting[0]])


def test_a_long_conversation_is_rendered_few_times(
    chatting: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    encode: Callable[..., list[int]] = chatting.encode_chat
    monkeypatch.setattr(chatting, "encode_chat", lambda messages: calls.append(1) or encode(messages))
    messages = [message(role, 20) for _ in range(1000) for role in ("user", "assistant")]
    limits = LengthLimits(1000, 10_000)
    found = encode_truncated([*messages, message("user", 20)], chatting, chatting.vocab_size, limits, 100)
    assert (found.dropped_messages, len(found.token_ids)) == (1958, 861)
    assert len(calls) <= 13
