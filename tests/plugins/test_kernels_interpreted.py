"""The Triton kernels against the reference: `kernels_*.py`, each in a process that interprets them."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from interpreted_kernels import finish, start

FILES = sorted(Path(__file__).parent.glob("kernels_*.py"))


@pytest.fixture(scope="module")
def processes() -> Iterator[dict[str, subprocess.Popen[str]]]:
    """Side by side: an interpreter uses one core."""
    running = {path.stem: start(path) for path in FILES}
    yield running
    for process in running.values():
        process.kill()
        process.wait()


@pytest.mark.parametrize("name", [path.stem for path in FILES])
def test_kernels_on_the_cpu(name: str, processes: dict[str, subprocess.Popen[str]]) -> None:
    finish(processes[name])


def test_there_are_kernels_to_interpret() -> None:
    assert [path.stem for path in FILES] == ["kernels_attention", "kernels_edges", "kernels_prepare"]
