"""Generation through the engine: tokens, text, limits, and wrong input."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fake_backend import FakeBackend, generate_together, greedy, logits_of

from pagelet.models.errors import CapacityError, EngineClosedError, InputError, PromptTooLongError
from pagelet.models.text import Tokenizer
from pagelet.runtime import Engine, EngineConfig, SamplingParams

MakeEngine = Callable[..., tuple[Engine, FakeBackend]]
VOCAB = 258
EOS = 1


def prompt_of(length: int, seed: int = 0) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(2, VOCAB, length).tolist()
    return tokens


def greedy_params(max_tokens: int, **others: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **others)


def test_greedy_tokens_are_the_models_own(make_engine: MakeEngine) -> None:
    engine, _ = make_engine(max_step_tokens=32)
    done = engine.generate(prompt_of(50), greedy_params(20))
    assert done.token_ids == tuple(greedy(prompt_of(50), 20, VOCAB))
    assert done.text == engine.tokenizer.decode(done.token_ids)
    assert done.finish_reason == "length"
    assert (done.usage.prompt_tokens, done.usage.completion_tokens, done.usage.cached_tokens) == (50, 20, 0)
    assert done.logprobs is None
    assert done.timings.time_to_first_token is not None
    assert 0 < done.timings.time_to_first_token <= done.timings.total
    assert done.timings.decode_tokens_per_second is not None
    assert done.timings.decode_tokens_per_second > 0


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_sequences_together_give_what_each_gives_alone(make_engine: MakeEngine, temperature: float) -> None:
    params = greedy_params(24, temperature=temperature, seed=7, top_p=0.95)
    prompts = [prompt_of(1 + 5 * i, seed=i) for i in range(16)]
    engine, _ = make_engine(max_step_tokens=512)
    alone = [engine.generate(prompt, params).token_ids for prompt in prompts]
    # A small pool and chunks of 16 tokens: chunked, batched and preempted.
    crowded, backend = make_engine({"num_blocks": 30}, max_sequences=8, max_step_tokens=16)
    together = [done.token_ids for done in generate_together(crowded, prompts, params)]
    assert together == alone
    assert crowded.stats().preemptions > 0
    assert max(len(batch) for batch in backend.batches) > 1


def test_the_same_seed_gives_the_same_text_and_samples_differ(make_engine: MakeEngine) -> None:
    engine, _ = make_engine()
    params = greedy_params(12, temperature=1.0, seed=3, n=3)
    done = engine.generate(prompt_of(5), params)
    assert engine.generate(prompt_of(5), params).choices == done.choices
    assert len({choice.token_ids for choice in done.choices}) == 3
    assert done.text == done.choices[0].text
    assert done.usage.completion_tokens == 36
    single = engine.generate(prompt_of(5), greedy_params(12, temperature=1.0, seed=3))
    assert single.choices == done.choices[:1]
    unseeded = greedy_params(12, temperature=1.0)
    assert (
        engine.generate(prompt_of(5), unseeded).token_ids != engine.generate(prompt_of(5), unseeded).token_ids
    )


def test_chunks_add_up_to_the_completion(make_engine: MakeEngine) -> None:
    engine, _ = make_engine()
    params = greedy_params(30, temperature=1.0, seed=1, n=2, logprobs=2)
    done = engine.generate(prompt_of(4), params)
    chunks = list(engine.stream(prompt_of(4), params))
    for index, choice in enumerate(done.choices):
        mine = [chunk for chunk in chunks if chunk.index == index]
        assert "".join(chunk.text for chunk in mine) == choice.text
        assert sum((chunk.token_ids for chunk in mine), ()) == choice.token_ids
        assert sum((chunk.logprobs or () for chunk in mine), ()) == choice.logprobs
        assert [chunk.finish_reason for chunk in mine][-1] == "length"
        assert {chunk.finish_reason for chunk in mine[:-1]} <= {None}


def test_logprobs_are_of_the_chosen_tokens(make_engine: MakeEngine) -> None:
    engine, _ = make_engine()
    done = engine.generate(prompt_of(4), greedy_params(5, logprobs=1))
    assert done.logprobs is not None
    assert tuple(entry.token_id for entry in done.logprobs) == done.token_ids
    row = logits_of(np.array(prompt_of(4)), VOCAB)[-1].astype(np.float64)
    expected = row.max() - math.log(np.exp(row).sum())
    assert done.logprobs[0].logprob == pytest.approx(expected, abs=1e-6)  # float64 against another order


def test_a_stop_string_ends_the_text_before_it(make_engine: MakeEngine) -> None:
    engine, _ = make_engine()
    params = {"logit_bias": dict.fromkeys(engine.tokenizer.encode("abcdef"), 30.0)}
    whole = engine.generate(prompt_of(4), greedy_params(40, **params)).text
    assert len(whole) == 40
    stop = whole[10:13]
    done = engine.generate(prompt_of(4), greedy_params(40, stop=stop, **params))
    assert done.text == whole[: whole.index(stop)]
    assert done.finish_reason == "stop"
    streamed = [chunk.text for chunk in engine.stream(prompt_of(4), greedy_params(40, stop=stop, **params))]
    assert "".join(streamed) == done.text


def test_half_a_stop_string_at_the_end_is_not_lost(make_engine: MakeEngine) -> None:
    engine, _ = make_engine()
    bias = {"logit_bias": dict.fromkeys(engine.tokenizer.encode("abcdef"), 30.0)}
    whole = engine.generate(prompt_of(4), greedy_params(10, **bias)).text
    stopped = greedy_params(10, stop=whole[-3:] + "never", **bias)
    assert engine.generate(prompt_of(4), stopped).text == whole
    assert "".join(chunk.text for chunk in engine.stream(prompt_of(4), stopped)) == whole


def test_an_emoji_arrives_as_one_chunk(make_engine: MakeEngine, tokenizer: Tokenizer) -> None:
    reply = tokenizer.encode("a🙂é!")
    engine, _ = make_engine({"script": [5, *reply]})
    chunks = list(engine.stream([5], greedy_params(len(reply))))
    assert [chunk.text for chunk in chunks] == ["a", "🙂", "é", "!"]
    assert [len(chunk.token_ids) for chunk in chunks] == [1, 4, 2, 1]
    cut = engine.generate([5], greedy_params(3))
    assert (cut.text, cut.token_ids) == ("a\ufffd", tuple(reply[:3]))


@pytest.mark.parametrize("option", [{"stop_token_ids": [9]}, {}])
def test_end_and_stop_tokens(make_engine: MakeEngine, option: dict[str, Any]) -> None:
    engine, _ = make_engine()
    token = 9 if option else EOS
    done = engine.generate(prompt_of(3), SamplingParams(max_tokens=9, logit_bias={token: 100.0}, **option))
    assert (done.text, done.token_ids, done.finish_reason) == ("", (token,), "stop")
    on = engine.generate(prompt_of(3), greedy_params(3, logit_bias={EOS: 100.0}))
    assert (on.token_ids, on.finish_reason) == ((EOS, EOS, EOS), "length")


def test_a_reply_ends_with_the_context(make_engine: MakeEngine) -> None:
    engine, _ = make_engine({"max_context": 40})
    done = engine.generate(prompt_of(30), greedy_params(100))
    assert (len(done.token_ids), done.finish_reason) == (10, "length")
    endless = SamplingParams(ignore_eos=True)
    assert len(engine.generate(prompt_of(39), endless).token_ids) == 1
    with pytest.raises(PromptTooLongError, match=r"40 tokens and the context 40"):
        engine.generate(prompt_of(40), endless)


def test_a_reply_without_a_limit_ends_with_the_cache(make_engine: MakeEngine) -> None:
    engine, _ = make_engine({"num_blocks": 5, "block_size": 4})
    done = engine.generate(prompt_of(10), SamplingParams(ignore_eos=True))
    assert (len(done.token_ids), done.finish_reason) == (11, "length")  # the last one needs no slot
    assert engine.generate(prompt_of(20), greedy_params(1)).finish_reason == "length"
    with pytest.raises(CapacityError, match=r"21 tokens .* cache has 20"):
        engine.generate(prompt_of(20), greedy_params(2))
    with pytest.raises(CapacityError, match=r"cache has 20"):
        engine.generate(prompt_of(21), greedy_params(1))


def test_text_prompts_go_through_the_tokenizer(make_engine: MakeEngine) -> None:
    engine, _ = make_engine()
    ids = engine.tokenizer.encode("Why is the sky blue?")
    assert (
        engine.generate("Why is the sky blue?", greedy_params(8)).token_ids
        == engine.generate(np.array(ids), greedy_params(8)).token_ids
        == tuple(greedy(list(ids), 8, VOCAB))
    )


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "empty"),
        ([], "empty"),
        ([1, 2, VOCAB], "token id 258 at position 2"),
        ([1, -2], "token id -2 at position 1"),
        ([1.5], "float64"),
        ([True], "bool"),
        ([2**70], "object"),
        ([[1, 2], [3]], "generate_all"),
        (["a", "b"], "generate_all"),
        ({"role": "user"}, "dict"),
        (7, "int"),
        (None, "NoneType"),
    ],
)
def test_wrong_prompts_are_refused_and_the_engine_goes_on(
    make_engine: MakeEngine, prompt: Any, message: str
) -> None:
    engine, _ = make_engine()
    with pytest.raises(InputError, match=message):
        engine.generate(prompt)
    assert len(engine.generate([5], greedy_params(2)).token_ids) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"timeout": 0}, "timeout is 0"),
        ({"timeout": math.nan}, "timeout is nan"),
        ({"timeout": "1"}, "timeout is '1'"),
        ({"priority": "high"}, "priority is 'high'"),
        ({"params": SamplingParams(stop_token_ids=[VOCAB])}, "258"),
    ],
)
def test_wrong_options_are_refused(make_engine: MakeEngine, options: dict[str, Any], message: str) -> None:
    engine, _ = make_engine()
    with pytest.raises(InputError, match=message):
        engine.submit([5], **options)


def test_logits_are_the_same_in_chunks_and_beside_others(make_engine: MakeEngine) -> None:
    engine, _ = make_engine({"num_blocks": 40}, max_step_tokens=24, max_sequences=4)
    tokens = prompt_of(100)
    others = [engine.submit(prompt_of(9, seed), greedy_params(60)) for seed in range(3)]
    logits = engine.logits(tokens)
    assert logits.dtype == np.float32
    assert (logits == logits_of(np.array(tokens), VOCAB)).all()
    for seed, request in enumerate(others):
        assert request.result().token_ids == tuple(greedy(prompt_of(9, seed), 60, VOCAB))
    with pytest.raises(InputError, match="empty"):
        engine.logits([])
    with pytest.raises(PromptTooLongError, match=r"129 tokens, the context 128"):
        engine.logits(prompt_of(129))
    small, _ = make_engine({"num_blocks": 2})
    with pytest.raises(CapacityError, match=r"9 tokens, the whole KV cache has room for 8"):
        small.logits(prompt_of(9))


def test_stats_count_blocks_and_tokens(make_engine: MakeEngine) -> None:
    engine, backend = make_engine()
    engine.generate(prompt_of(10), greedy_params(5))
    stats = engine.stats()
    assert (stats.prefill_tokens, stats.decode_tokens, stats.steps) == (10, 4, 5)
    assert (stats.blocks_total, stats.block_size, stats.kv_bytes) == (64, 4, backend.layout.num_bytes)
    assert (stats.blocks_used, stats.peak_blocks_used, stats.live_tokens) == (0, 4, 0)
    assert (stats.blocks_cached, stats.blocks_free) == (3, 61)  # 14 tokens were read: three full blocks
    assert 0 < stats.step_seconds_median <= stats.step_seconds_p95


def test_check_integrity_sees_a_lost_block(make_engine: MakeEngine) -> None:
    engine, _ = make_engine()
    engine.generate(prompt_of(10), greedy_params(5))
    engine.check_integrity()
    lost = engine._loop.blocks.pools[0].allocate()
    with pytest.raises(AssertionError, match="neither free nor cached nor in a table"):
        engine.check_integrity()
    engine._loop.blocks.pools[0].release(lost)
    request = engine.submit([5], SamplingParams(ignore_eos=True))
    engine.check_integrity()
    request.cancel()


def test_a_closed_engine_says_so(make_engine: MakeEngine) -> None:
    engine, backend = make_engine()
    with engine:
        engine.generate([5], greedy_params(1))
    assert backend.closed
    engine.close()
    for call in (engine.generate, engine.stream, engine.logits):
        with pytest.raises(EngineClosedError, match="closed"):
            call([5])
    with pytest.raises(EngineClosedError, match="closed"):
        engine.check_integrity()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kv_memory": "12 parsecs"}, "kv_memory is '12 parsecs'"),
        ({"kv_memory": 0}, "kv_memory is 0"),
        ({"kv_memory": True}, "kv_memory is True"),
        ({"kv_memory": "9" * 40}, "kv_memory"),
        ({"kv_memory": 1.5}, "kv_memory is 1.5"),
        ({"threads": 0}, "threads is 0"),
        ({"threads": "2"}, "threads is '2'"),
        ({"max_sequences": None}, "max_sequences is None"),
        ({"max_sequences": 64, "max_step_tokens": 32}, "below max_sequences"),
        ({"max_queue": -1}, "max_queue is -1"),
        ({"kv_memry": 5}, "did you mean 'kv_memory'"),
    ],
)
def test_wrong_configs_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        EngineConfig.from_dict(values)


def test_sizes_and_the_default_pool() -> None:
    def of(tokens: int) -> int:
        return 100 * tokens

    assert EngineConfig(kv_memory="1.5 MiB").cache_bytes(of, 4096, 1 << 30) == 3 << 19
    assert EngineConfig(kv_memory="2kb").cache_bytes(of, 4096, 1 << 30) == 2000
    assert EngineConfig(kv_memory="77").cache_bytes(of, 4096, 1 << 30) == 77
    assert EngineConfig().cache_bytes(of, 4096, 1 << 30) == 4 * 4096 * 100
    assert EngineConfig(max_context=16).cache_bytes(of, 4096, 1 << 30) == 4 * 16 * 100
    with pytest.raises(CapacityError, match="free"):
        EngineConfig(kv_memory="16000GiB").cache_bytes(of, 4096, 1 << 30)
