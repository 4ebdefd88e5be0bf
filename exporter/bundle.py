"""Writing a bundle's folder so that it appears whole or not at all."""

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from pagelet.models.errors import BundleError, InputError, UnfinishedError
from pagelet.models.manifest import MANIFEST_NAME, FileEntry, hash_file

# Folders that threads of this process write just now; other processes' carry their own numbers.
_in_use: set[Path] = set()


@contextlib.contextmanager
def new_bundle(
    out: Path, *, force: bool = False, resumes: Callable[[Path], bool] = lambda folder: False
) -> Iterator[Path]:
    """A temporary folder beside `out` that becomes `out` when the block ends without an error.

    A folder that an interrupted or killed export to the same place left is taken up again if it `resumes`,
    else removed. After an interruption (Ctrl-C) or an `UnfinishedError` it stays for that, after any other
    error it goes.

    Raises:
        InputError: `out` exists and is not to be replaced, or is no bundle, or cannot be made, or is being
            written by this process.
    """
    out = Path(os.path.abspath(out))  # noqa: PTH100  (resolve() would follow a link that is to be replaced)
    folder = partial_folder(out)
    if folder in _in_use:
        raise InputError(f"another export to {out} is running in this process; wait for it.")
    _in_use.add(folder)
    try:
        yield from _written(folder, out, force, resumes)
    finally:
        _in_use.discard(folder)


def _written(folder: Path, out: Path, force: bool, resumes: Callable[[Path], bool]) -> Iterator[Path]:
    """What `new_bundle` does, with the folder to itself."""
    try:
        _sweep(out, folder, resumes)  # first: it may put a bundle back at `out`
        _check_destination(out, force)
        if folder.exists() and not resumes(folder):  # of an earlier export by this process
            shutil.rmtree(folder)
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"cannot make {out}: {error.strerror}. Choose a folder that you may write to."
        ) from error
    try:
        yield folder
        _move_into_place(folder, out)
    except (KeyboardInterrupt, UnfinishedError):
        if not resumes(folder):
            shutil.rmtree(folder, ignore_errors=True)
        raise
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError):
            raise BundleError(
                f"writing {out} failed: {error.strerror or error}. Nothing was left behind."
            ) from error
        raise


def partial_folder(out: Path) -> Path:
    """Where this process writes the bundle `out` until it is whole."""
    return out.parent / f".{out.name}.partial-{os.getpid()}"


def file_entries(folder: Path, weights: frozenset[str]) -> dict[str, FileEntry]:
    """Size and SHA-256 of every file below `folder`; names in `weights` are marked as such."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    names = {path.relative_to(folder).as_posix(): path for path in files}
    return {
        name: FileEntry(path.stat().st_size, hash_file(path), weights=name in weights)
        for name, path in names.items()
    }


def _check_destination(out: Path, force: bool) -> None:
    if not out.exists():
        return
    if not out.is_dir():
        raise InputError(f"{out} is a file; name a folder for the bundle.")
    if not any(out.iterdir()):
        return
    if not (out / MANIFEST_NAME).is_file():
        raise InputError(
            f"{out} holds something that is not a bundle; it is never replaced. Name another folder."
        )
    if not force:
        raise InputError(f"{out} exists; add --force to replace it, or name another folder.")


def _sweep(out: Path, folder: Path, resumes: Callable[[Path], bool]) -> None:
    """Remove what dead exports to the same place left, but for one to go on with; those that run are kept.

    One that was killed while it replaced `out` has moved the old bundle aside: that goes back.
    """
    pattern = re.compile(re.escape(f".{out.name}.partial-") + r"(\d+)(-old)?")
    for path in sorted(out.parent.glob(".*.partial-*"), reverse=True):
        match = pattern.fullmatch(path.name)
        if not match or _alive(int(match.group(1))):
            continue
        if match.group(2) and not out.exists():
            path.rename(out)
        elif not match.group(2) and not folder.exists() and resumes(path):
            path.rename(folder)
        elif path != folder:
            shutil.rmtree(path, ignore_errors=True)


def _alive(pid: int) -> bool:
    if pid == os.getpid():
        return False
    if os.name == "nt":  # os.kill ends a process there
        return True
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _move_into_place(folder: Path, out: Path) -> None:
    if not out.exists():
        folder.rename(out)
        return
    old = folder.with_name(folder.name + "-old")
    out.rename(old)
    try:
        folder.rename(out)
    except OSError:
        old.rename(out)
        raise
    shutil.rmtree(old, ignore_errors=True)
