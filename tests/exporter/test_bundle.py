"""A bundle appears whole or not at all."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pagelet.exporter.bundle import file_entries, new_bundle
from pagelet.models.errors import BundleError, InputError


def make(out: Path, text: str, *, force: bool = False) -> None:
    with new_bundle(out, force=force) as folder:
        (folder / "manifest.json").write_text(text)


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if ".partial-" in path.name]


def test_it_moves_into_place(tmp_path: Path) -> None:
    make(tmp_path / "deep" / "out", "one")
    assert (tmp_path / "deep" / "out" / "manifest.json").read_text() == "one"
    assert not leftovers(tmp_path / "deep")


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), new_bundle(tmp_path / "out") as folder:
        (folder / "model.weights").write_bytes(b"half")
        raise error
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_said_plainly(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="No space left"), new_bundle(tmp_path / "out"):
        raise OSError(28, "No space left on device")
    assert list(tmp_path.iterdir()) == []


def test_an_existing_bundle_is_replaced_only_by_force(tmp_path: Path) -> None:
    make(tmp_path / "out", "one")
    with pytest.raises(InputError, match="--force"):
        make(tmp_path / "out", "two")
    assert (tmp_path / "out" / "manifest.json").read_text() == "one"
    make(tmp_path / "out", "two", force=True)
    assert (tmp_path / "out" / "manifest.json").read_text() == "two"
    assert not leftovers(tmp_path)


def test_a_failed_replacement_keeps_the_old_bundle(tmp_path: Path) -> None:
    make(tmp_path / "out", "one")
    with pytest.raises(ValueError, match="stop"), new_bundle(tmp_path / "out", force=True):
        raise ValueError("stop")
    assert (tmp_path / "out" / "manifest.json").read_text() == "one"


def test_what_is_no_bundle_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.png").touch()
    (tmp_path / "file").touch()
    for name in ("photos", "file"):
        with pytest.raises(InputError):
            make(tmp_path / name, "x", force=True)
    assert (tmp_path / "photos" / "cat.png").exists()


def test_an_empty_folder_may_be_used(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    make(tmp_path / "out", "one")
    assert (tmp_path / "out" / "manifest.json").is_file()


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot make"):
        make(tmp_path / "file" / "out", "x")


def test_what_a_killed_export_left_is_swept_by_the_next(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from pagelet.exporter.bundle import new_bundle\n"
        "with new_bundle(Path(sys.argv[1])): print('in', flush=True); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "out")], stdout=subprocess.PIPE)
    with child:
        assert child.stdout
        child.stdout.readline()
        assert leftovers(tmp_path) == [f".out.partial-{child.pid}"]
        make(tmp_path / "out", "one")
        assert leftovers(tmp_path) == [f".out.partial-{child.pid}"], (
            "a running export's folder was taken away"
        )
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
    time.sleep(0.01)
    make(tmp_path / "out", "two", force=True)
    assert not leftovers(tmp_path)


def test_an_export_killed_while_it_replaced_a_bundle_gives_it_back(tmp_path: Path) -> None:
    make(tmp_path / "out", "one")
    (tmp_path / "out").rename(tmp_path / ".out.partial-999999999-old")
    (tmp_path / ".out.partial-999999999").mkdir()
    with pytest.raises(InputError, match="--force"):
        make(tmp_path / "out", "two")
    assert (tmp_path / "out" / "manifest.json").read_text() == "one"
    assert not leftovers(tmp_path)


def test_a_replacement_that_fails_at_the_last_step_puts_the_old_bundle_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path / "out", "one")
    rename = Path.rename

    def fail_for_the_new_one(self: Path, target: Path) -> Path:
        if self.name.endswith(str(os.getpid())):
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail_for_the_new_one)
    with pytest.raises(BundleError, match="Input/output"):
        make(tmp_path / "out", "two", force=True)
    assert (tmp_path / "out" / "manifest.json").read_text() == "one"
    assert not leftovers(tmp_path)


def test_entries_hold_size_hash_and_which_are_weights(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"")
    (tmp_path / "w").write_bytes(b"12")
    entries = file_entries(tmp_path, frozenset({"w"}))
    assert (entries["a"].bytes, entries["a"].weights) == (0, False)
    assert entries["a"].sha256 == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert (entries["w"].bytes, entries["w"].weights) == (2, True)
