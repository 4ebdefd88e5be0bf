"""Session files: whole or not at all; and none, however damaged, does harm."""

import json
import struct
import tracemalloc
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from fake_backend import FakeBackend
from hypothesis import given, settings
from hypothesis import strategies as st

from pagelet.models.errors import EngineClosedError, InputError, SessionError
from pagelet.runtime import Engine, SamplingParams

MakeEngine = Callable[..., tuple[Engine, FakeBackend]]
PREAMBLE = struct.Struct("<16sII")


def edited(data: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    """The file with a changed header, and a checksum that is right again."""
    magic, version, length = PREAMBLE.unpack(data[: PREAMBLE.size])
    header = json.loads(data[PREAMBLE.size : PREAMBLE.size + length])
    change(header)
    text = json.dumps(header).encode()
    body = PREAMBLE.pack(magic, version, len(text)) + text + data[PREAMBLE.size + length : -32]
    return body + sha256(body).digest()


def test_a_file_of_another_kind_is_refused_with_both_values(make_engine: MakeEngine, saved: Path) -> None:
    data = saved.read_bytes()
    engine, _ = make_engine({"block_size": 8})
    with pytest.raises(SessionError, match=r"the block size 4; this engine has 8"):
        engine.load_session(saved)
    engine, _ = make_engine({"windows": (0, 12)})
    with pytest.raises(SessionError, match=r"the windows \(0,\); this engine has \(0, 12\)"):
        engine.load_session(saved)
    engine, _ = make_engine()
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
    request = engine.submit([5], SamplingParams(max_tokens=2))
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
