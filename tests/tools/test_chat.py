"""`pagelet chat`, with a session file and a context that runs full."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pagelet.models.manifest import MANIFEST_NAME
from pagelet.tools.cli import main

MakeCheckpoint = Callable[..., Path]
TEMPLATE = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}>"


@pytest.fixture(scope="module")
def bundle(make_llama: MakeCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    checkpoint = make_llama(max_position_embeddings=256)
    (checkpoint / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    out = tmp_path_factory.mktemp("chat") / "bundle"
    assert main(["export", str(checkpoint), str(out), "--no-certificate"]) == 0
    return out


@pytest.fixture
def chat(
    bundle: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str, str]]:
    def run(*lines: str, options: tuple[object, ...] = ()) -> tuple[int, str, str]:
        typed: Iterator[str] = iter((*lines, "/exit"))
        monkeypatch.setattr("builtins.input", lambda prompt: next(typed))
        asked = ("--max-tokens", 12, "--ignore-eos", "--kv-memory", "4MiB", "--system", "be brief", *options)
        status = main(["chat", str(bundle), *map(str, asked)])
        out, err = capsys.readouterr()
        return status, out, err

    return run


def test_a_session_goes_on_where_it_ended(chat: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    status, whole, _ = chat("hello", "why is the sky blue?")
    assert status == 0
    session = ("--session", tmp_path / "session")
    first = chat("hello", options=session)
    assert "restored" not in first[2]
    second = chat("why is the sky blue?", options=session)
    assert first[1] + second[1] == whole
    assert "32 of 42 tokens restored" in second[2]  # 30 of the prompt, 12 of the reply; a block has 32
    assert chat(options=session)[0] == 0


def test_dropped_messages_are_told(chat: Callable[..., tuple[int, str, str]]) -> None:
    status, _, err = chat("x" * 70, "y" * 70, "z" * 70)
    assert status == 0
    assert err.count("the oldest 2 messages were dropped") == 1
    _, _, err = chat("x" * 300)
    assert "the system prompt and the last turn have" in err


def test_a_foreign_session_is_refused(
    chat: Callable[..., tuple[int, str, str]], bundle: Path, tmp_path: Path
) -> None:
    status, _, err = chat("hi", options=("--session", bundle / MANIFEST_NAME))
    assert status == 1
    assert "is not a pagelet session" in err
