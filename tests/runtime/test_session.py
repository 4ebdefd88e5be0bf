"""Sessions: what is saved comes back, exactly; and no file, however damaged, does harm."""

import json
import struct
import threading
import tracemalloc
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_backend import FakeBackend, greedy
from hypothesis import given, settings
from hypothesis import strategies as st
from test_engine_threads import Gate, eventually

from pagelet.exporter import ExportOptions, export
from pagelet.models.errors import EngineClosedError, InputError, PageletError, SessionError
from pagelet.runtime import Engine, EngineConfig, SamplingParams

MakeEngine = Callable[..., tuple[Engine, FakeBackend]]
VOCAB = 258
WINDOWS = [(0,), (12,), (0, 12)]
PREAMBLE = struct.Struct("<16sII")


def prompt_of(length: int, seed: int = 0) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(2, VOCAB, length).tolist()
    return tokens


def params(max_tokens: int | None = 8, **others: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **others)


def edited(data: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    """The file with a changed header, and a checksum that is right again."""
    magic, version, length = PREAMBLE.unpack(data[: PREAMBLE.size])
    header = json.loads(data[PREAMBLE.size : PREAMBLE.size + length])
    change(header)
    text = json.dumps(header).encode()
    body = PREAMBLE.pack(magic, version, len(text)) + text + data[PREAMBLE.size + length : -32]
    return body + sha256(body).digest()


@pytest.fixture
def saved(make_engine: MakeEngine, tmp_path: Path) -> Path:
    """A sampled request of 30 tokens, eight of them generated."""
    engine, _ = make_engine()
    request = engine.submit(prompt_of(22), params(8, temperature=0.7, stop=["zz"], seed=3))
    request.result(timeout=10)
    engine.save_session(tmp_path / "saved", request)
    return tmp_path / "saved"


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
    eventually(lambda: bool(engine._loop._calls._waiting))
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
    again = after.submit(prompt_of(3), params(1))
    again.result(timeout=10)


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
    eventually(lambda: bool(engine._loop._calls._waiting))
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


def test_a_file_of_another_kind_is_refused_with_both_values(make_engine: MakeEngine, saved: Path) -> None:
    data = saved.read_bytes()
    engine, _ = make_engine({"block_size": 8})
    with pytest.raises(SessionError, match=r"the block size 4; this engine has 8"):
        engine.load_session(saved)
    engine, _ = make_engine({"windows": (0, 12)})
    with pytest.raises(SessionError, match=r"the windows \(0,\); this engine has \(0, 12\)"):
        engine.load_session(saved)
    engine, backend = make_engine()
    for key, value, message in (
        ("cache_type", "int8", "the cache type int8; this engine has f32"),
        ("fingerprint", "another", "the model another; this engine has fake"),
        ("num_tokens", 31, "its header describes"),
        ("num_tokens", 0, "names 0 tokens"),
        ("num_tokens", 10**30, "names 1000"),
        ("saved_tokens", 27, "whole blocks of 4"),
        ("saved_tokens", 32, "32 tokens out of 30"),
        ("saved_tokens", 24, "expected"),
        ("num_blocks", [8], "expected"),
        ("num_blocks", [], "expected"),
        ("num_blocks", [-1], "out of range"),
        ("extra", 1, "unknown key 'extra'"),
    ):
        saved.write_bytes(edited(data, lambda header, key=key, value=value: header.update({key: value})))
        with pytest.raises(SessionError, match=message):
            engine.load_session(saved)
    for key, value, message in (
        ("seed", -1, "seed of -1"),
        ("sample_index", 1, "sample of 1"),
        ("prompt_tokens", 31, "length of 31"),
        ("params", {"temperature": -1.0}, "temperature is -1.0"),
        ("params", {"temprature": 1.0}, "did you mean 'temperature'"),
    ):
        saved.write_bytes(
            edited(data, lambda header, key=key, value=value: header["sampler"].update({key: value}))
        )
        with pytest.raises(SessionError, match=message):
            engine.load_session(saved)
    magic, version, length = PREAMBLE.unpack(data[: PREAMBLE.size])
    saved.write_bytes(PREAMBLE.pack(magic, version + 1, length) + data[PREAMBLE.size :])
    with pytest.raises(SessionError, match="version 2; this pagelet reads version 1"):
        engine.load_session(saved)
    small, _ = make_engine({"vocab_size": 100})
    saved.write_bytes(data)
    with pytest.raises(SessionError, match="outside the vocabulary of 100"):
        small.load_session(saved)
    assert engine.stats().blocks_cached == 0
    backend.close()


def test_damaged_files_are_refused_and_cost_little(make_engine: MakeEngine, saved: Path) -> None:
    engine, _ = make_engine()
    whole = saved.read_bytes()

    @settings(max_examples=150, deadline=None)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        damaged, readable = _damaged(whole, data)
        saved.write_bytes(damaged)
        tracemalloc.start()
        try:
            engine.load_session(saved)
        except SessionError:
            pass
        else:
            assert readable, "damage was not noticed"
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 4 << 20  # the pieces in which the file is hashed, and JSON

    check()
    engine.check_integrity()


def _damaged(whole: bytes, data: st.DataObject) -> tuple[bytes, bool]:
    """A file like `whole`, and whether it may be taken: only where its checksum is right again."""
    kind = data.draw(st.sampled_from(["flip", "cut", "longer", "length", "header"]))
    damaged = bytearray(whole)
    if kind == "flip":
        for at in data.draw(st.lists(st.integers(0, len(whole) - 1), min_size=1, max_size=4, unique=True)):
            damaged[at] ^= data.draw(st.integers(1, 255))
    elif kind == "cut":
        del damaged[data.draw(st.integers(0, len(whole) - 1)) :]
    elif kind == "longer":
        damaged += data.draw(st.binary(min_size=1, max_size=40))
    elif kind == "length":
        other = data.draw(st.integers(0, 2**32 - 1).filter(lambda n: n != PREAMBLE.unpack(whole[:24])[2]))
        damaged[20:24] = other.to_bytes(4, "little")
    else:
        return edited(whole, lambda header: _spoil(header, data)), True
    return bytes(damaged), False


def _spoil(header: dict[str, Any], data: st.DataObject) -> None:
    """Put anything in the place of one value, in the header or in its sampler."""
    at = data.draw(st.sampled_from([header, header["sampler"], header["sampler"]["params"]]))
    number = st.integers(-(2**70), 2**70)
    anything = st.recursive(
        st.none() | st.booleans() | number | st.floats() | st.text(max_size=9),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=6,
    )
    at[data.draw(st.sampled_from(sorted(at)))] = data.draw(number | st.lists(number, max_size=2) | anything)


def test_files_that_cannot_be_read_or_written(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine, _ = make_engine()
    with pytest.raises(InputError, match="cannot read"):
        engine.load_session(tmp_path / "missing")
    with pytest.raises(InputError, match="cannot read"):
        engine.load_session(tmp_path)
    with pytest.raises(InputError, match="cannot write"):
        engine.save_session(tmp_path / "no" / "folder", [5, 6])
    with pytest.raises(InputError, match="empty"):
        engine.save_session(tmp_path / "none", [])
    assert list(tmp_path.iterdir()) == []
    request = engine.submit([5], params(2))
    request.result(timeout=10)
    with pytest.raises(InputError, match="sample 1"):
        engine.save_session(tmp_path / "none", request, sample=1)
    engine.close()
    with pytest.raises(EngineClosedError):
        engine.save_session(tmp_path / "none", [5])


def test_a_failed_write_leaves_the_older_file(
    make_engine: MakeEngine, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, _ = make_engine()
    before = saved.read_bytes()

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(InputError, match="No space left"):
        engine.save_session(saved, [5, 6, 7])
    assert saved.read_bytes() == before
    assert list(saved.parent.iterdir()) == [saved]


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


@pytest.fixture(scope="module")
def bundles(make_llama: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    source, folder = make_llama(), tmp_path_factory.mktemp("bundles")
    for kind in ("f32", "int8"):
        export(source, folder / kind, ExportOptions(cache_type=kind, block_size=16))
    return {kind: folder / kind for kind in ("f32", "int8")}
