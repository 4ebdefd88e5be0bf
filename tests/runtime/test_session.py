"""Sessions: what is saved comes back, exactly; and no file, however damaged, does harm."""

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exporting import uncertified
from fake_backend import FakeBackend, greedy
from test_engine_threads import Gate, eventually

from pagelet.exporter import export
from pagelet.models.cache import group_bytes_per_token
from pagelet.models.errors import InputError, PageletError, SessionError
from pagelet.models.manifest import load_manifest
from pagelet.runtime import Engine, EngineConfig, SamplingParams
from pagelet.runtime.backends.cpu_cache import CpuCache
from pagelet.runtime.cache_layout import CacheLayout, GroupLayout

MakeEngine = Callable[..., tuple[Engine, FakeBackend]]
VOCAB = 258
WINDOWS = [(0,), (12,), (0, 12)]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(2, VOCAB, length).tolist()
    return tokens


def params(max_tokens: int | None = 8, **others: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **others)


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("length", [1, 3, 4, 5, 40])
def test_a_conversation_goes_on_in_another_engine(
    make_engine: MakeEngine, tmp_path: Path, windows: tuple[int, ...], length: int
) -> None:
    before, _ = make_engine({"windows": windows})
    request = before.submit(prompt_of(length), params(9))
    tokens = [*prompt_of(length), *request.result(timeout=10).token_ids]
    info = before.save_session(tmp_path / "saved", request)
    expected = (length + 8) // 4 * 4
    assert (info.num_tokens, info.saved_tokens) == (length + 9, expected)
    assert info.num_bytes == (tmp_path / "saved").stat().st_size
    after, _ = make_engine({"windows": windows})
    session = after.load_session(tmp_path / "saved")
    assert (session.token_ids, session.restored_tokens) == (tokens, expected)
    after.check_integrity()
    longer = [*tokens, *prompt_of(3, seed=9)]
    for prompt in (longer, tokens):
        done = after.generate(prompt, params(10))
        assert done.usage.cached_tokens == expected
        assert list(done.token_ids) == greedy(prompt, 10, VOCAB, windows)
    assert after.stats().blocks_used == 0


@pytest.mark.parametrize("asked", [
    params(None),
    params(30, temperature=1.0, seed=5),
    params(30, temperature=0.9, top_p=0.9, frequency_penalty=0.7, repetition_penalty=1.3, n=3),
])  # fmt: skip
def test_resumed_tokens_are_those_of_the_uninterrupted_request(
    make_engine: MakeEngine, tmp_path: Path, asked: SamplingParams
) -> None:
    gate = Gate()
    engine, _ = make_engine({"before_run": gate})
    request = engine.submit(prompt_of(18), asked)
    gate.let(9)
    sample = asked.n - 1
    eventually(lambda: len(request.samples[sample].tokens) > 20)
    saving = threading.Thread(
        target=engine.save_session, args=(tmp_path / "saved", request), kwargs={"sample": sample}
    )
    saving.start()
    eventually(lambda: bool(engine._loop._calls._waiting) or not saving.is_alive())
    gate.open()
    saving.join(timeout=10)
    whole = request.result(timeout=10).choices[sample].token_ids
    after, _ = make_engine()
    session = after.load_session(tmp_path / "saved")
    assert session.token_ids[:18] == prompt_of(18)
    so_far = tuple(session.token_ids[18:])
    assert 2 <= len(so_far) < len(whole)
    assert session.restored_tokens > 0
    done = after.resume(session).result(timeout=10)
    assert so_far + done.token_ids == whole
    assert done.usage.cached_tokens == session.restored_tokens


def test_a_resumed_request_is_saved_and_resumed_again(make_engine: MakeEngine, tmp_path: Path) -> None:
    asked = params(30, temperature=1.0, frequency_penalty=1.5, seed=8)
    engine, _ = make_engine()
    whole = engine.generate(prompt_of(10), asked).token_ids
    request = engine.submit(prompt_of(10), params(5, temperature=1.0, frequency_penalty=1.5, seed=8))
    found = list(request.result(timeout=10).token_ids)
    for _ in range(5):
        engine.save_session(tmp_path / "saved", request)
        session = engine.load_session(tmp_path / "saved")
        assert session.sampler is not None
        assert session.sampler.prompt_tokens == 10
        with pytest.raises(InputError, match="has generated all of its"):
            engine.resume(session)
        request = engine.resume(session, max_tokens=5)
        found += request.result(timeout=10).token_ids
    assert tuple(found) == whole


def test_tokens_salt_and_metadata(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine, _ = make_engine()
    engine.generate(prompt_of(21), params(1), cache_salt="mine")
    assert engine.save_session(tmp_path / "a", prompt_of(21)).saved_tokens == 0
    info = engine.save_session(tmp_path / "b", prompt_of(21), cache_salt="mine", metadata={"x": [1, "ü"]})
    assert info.saved_tokens == 20
    other, _ = make_engine()
    session = other.load_session(tmp_path / "b", cache_salt="theirs")
    assert (session.sampler, session.metadata) == (None, {"x": [1, "ü"]})
    with pytest.raises(InputError, match="tokens only"):
        other.resume(session)
    assert other.generate(prompt_of(21), params(1)).usage.cached_tokens == 0
    assert other.generate(prompt_of(21), params(1), cache_salt="theirs").usage.cached_tokens == 20
    with pytest.raises(InputError, match="metadata is not JSON"):
        engine.save_session(tmp_path / "c", prompt_of(21), metadata={"x": object()})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_without_a_prefix_cache_tokens_alone_come_back(make_engine: MakeEngine, saved: Path) -> None:
    engine, _ = make_engine(prefix_cache=False)
    session = engine.load_session(saved)
    assert (len(session.token_ids), session.restored_tokens) == (30, 0)
    assert engine.save_session(saved, session.token_ids).saved_tokens == 0


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("num_blocks", [6, 8, 20])
def test_what_does_not_fit_is_dropped_from_the_end(
    make_engine: MakeEngine, tmp_path: Path, windows: tuple[int, ...], num_blocks: int
) -> None:
    engine, _ = make_engine({"windows": windows})
    engine.generate(prompt_of(50), params(1))
    engine.save_session(tmp_path / "saved", prompt_of(50))
    small, _ = make_engine({"windows": windows, "num_blocks": num_blocks, "max_step_tokens": 4})
    session = small.load_session(tmp_path / "saved")
    # A window has its last blocks alone: without the last tokens of the others they are of no use.
    everything = num_blocks >= 12 or windows == (12,)
    shorter = num_blocks * 4 if windows == (0,) else 0
    assert session.restored_tokens == (48 if everything else shorter)
    small.check_integrity()
    if session.restored_tokens:
        # One token more than the blocks have, where a sequence of that length fits into the whole cache.
        prompt = session.token_ids[: session.restored_tokens + everything]
        done = small.generate(prompt, params(1))
        assert done.usage.cached_tokens == (len(prompt) - 1) // 4 * 4
        assert list(done.token_ids) == greedy(prompt, 1, VOCAB, windows)


def test_running_requests_keep_their_blocks_and_what_is_there_is_not_doubled(
    make_engine: MakeEngine, saved: Path
) -> None:
    gate = Gate()
    engine, _ = make_engine({"num_blocks": 12, "before_run": gate})
    request = engine.submit(prompt_of(30, seed=4), params(9))
    gate.let(2)
    loaded: list[int] = []
    loading = threading.Thread(target=lambda: loaded.append(engine.load_session(saved).restored_tokens))
    loading.start()
    eventually(lambda: bool(engine._loop._calls._waiting) or not loading.is_alive())
    gate.open()
    loading.join(timeout=10)
    assert list(request.result(timeout=10).token_ids) == greedy(prompt_of(30, seed=4), 9, VOCAB)
    assert loaded == [16]  # four of twelve blocks are free
    eventually(lambda: engine.stats().blocks_used == 0)
    assert engine.load_session(saved).restored_tokens == 28
    evicted, cached = engine.stats().evictions, engine.stats().blocks_cached
    assert engine.load_session(saved).restored_tokens == 28
    assert (engine.stats().evictions, engine.stats().blocks_cached) == (evicted, cached)
    engine.check_integrity()


def test_a_write_that_fails_in_the_backend_loses_no_block(
    make_engine: MakeEngine, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, backend = make_engine()

    def broken(*_: object) -> None:
        raise PageletError("the device is gone")

    monkeypatch.setattr(backend, "write_blocks", broken)
    with pytest.raises(PageletError, match="the device is gone"):
        engine.load_session(saved)
    engine.check_integrity()
    assert engine.stats().blocks_free == 64


def test_a_callback_must_not_wait_for_a_session(make_engine: MakeEngine, saved: Path) -> None:
    engine, _ = make_engine()
    errors: list[Exception] = []

    def on_progress(done: int, total: int) -> None:
        try:
            engine.load_session(saved)
        except InputError as error:
            errors.append(error)

    engine.generate(prompt_of(5), params(1), on_progress=on_progress)
    assert "would wait for itself" in str(errors[0])


@pytest.mark.parametrize("kind", ["f32", "int8"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_real_model_after_a_restart(
    bundles: dict[str, Path], tmp_path: Path, kind: str, temperature: float
) -> None:
    asked = params(60, temperature=temperature, seed=7)
    prompt = prompt_of(50)
    config = EngineConfig(kv_memory="4MiB", threads=1)
    with Engine.open(bundles[kind], config) as engine:
        whole = engine.generate(prompt, asked).token_ids
    with Engine.open(bundles[kind], config) as engine:
        request = engine.submit(prompt, params(25, temperature=temperature, seed=7))
        first = request.result().token_ids
        assert engine.save_session(tmp_path / "saved", request).saved_tokens == 64
        logits = engine.logits([*prompt, *first])[-1]
    with Engine.open(bundles[kind], config) as engine:
        session = engine.load_session(tmp_path / "saved")
        assert session.restored_tokens == 64
        done = engine.resume(session, max_tokens=35).result()
        assert done.usage.cached_tokens == 64
        assert (*first, *done.token_ids) == whole
        # The blocks that the prefix cache gives out are, to the bit, those that were computed.
        again = engine.generate(session.token_ids, params(1, logprobs=20))
        np.testing.assert_array_equal(engine.logits(session.token_ids)[-1], logits)
        fresh = engine.generate(session.token_ids, params(1, logprobs=20), prefix_cache=False)
        assert again.logprobs == fresh.logprobs
    other = bundles["int8" if kind == "f32" else "f32"]
    with Engine.open(other, config) as engine, pytest.raises(SessionError, match=f"cache type {kind}"):
        engine.load_session(tmp_path / "saved")


@pytest.mark.parametrize("kind", ["f32", "f16", "int8", "fp8"])
def test_a_block_is_what_the_layers_of_its_group_have(bundles: dict[str, Path], kind: str) -> None:
    spec = load_manifest(bundles["f32"]).spec
    first, second = spec.layers
    spec = replace(spec, layers=(replace(first, window=40), second))
    sizes = [16 * size for size in group_bytes_per_token(spec, kind)]
    layout = CacheLayout(16, (GroupLayout(0, 9, sizes[0]), GroupLayout(40, 7, sizes[1])), 64)
    cache, other, rng = CpuCache(spec, kind, layout), CpuCache(spec, kind, layout), np.random.default_rng(0)
    for array in cache.arrays:
        array.memory[:] = rng.integers(1, 100, array.memory.shape)
    data = cache.read_blocks(1, [5, 0])
    assert data.shape == (2, sizes[1])
    other.write_blocks(1, [2, 6], list(data))
    for ours, theirs in zip(cache.arrays, other.arrays, strict=True):
        untouched = theirs.memory
        if theirs.group == 1:
            np.testing.assert_array_equal(theirs.memory[[2, 6]], ours.memory[[5, 0]])
            untouched = theirs.memory[[0, 1, 3, 4, 5]]
        assert not untouched.any()


@pytest.fixture(scope="module")
def bundles(make_llama: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    source, folder = make_llama(), tmp_path_factory.mktemp("bundles")
    for kind in ("f32", "int8"):
        export(source, folder / kind, uncertified(cache_type=kind, block_size=16))
    return {kind: folder / kind for kind in ("f32", "int8")}
