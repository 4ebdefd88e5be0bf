"""The Triton kernels against the reference: `kernels_*.py`, each in a process that interprets them."""

from __future__ import annotations

from pathlib import Path

import pytest
from interpreted_kernels import in_own_process

FILES = sorted(Path(__file__).parent.glob("kernels_*.py"))


@pytest.mark.parametrize("file", [path.name for path in FILES])
def test_kernels_on_the_cpu(file: str) -> None:
    in_own_process(str(Path(__file__).with_name(file)))


def test_there_are_kernels_to_interpret() -> None:
    assert [path.stem for path in FILES] == ["kernels_attention", "kernels_edges", "kernels_prepare"]
