"""What the runtime must not import before it is needed: start-up time is mostly imports."""

import subprocess
import sys

import pytest

LATER = {
    "asyncio",
    "jinja2",
    "onnxruntime",
    "pagelet.exporter",
    "pagelet.runtime.backends.cpu",
    "importlib.metadata",
}


@pytest.mark.parametrize(
    "code", ["import pagelet.runtime", "from pagelet.tools.cli import build_parser; build_parser('generate')"]
)
def test_not_yet_imported(code: str) -> None:
    code += f"; import sys; print(sorted({LATER!r} & set(sys.modules)))"
    # Without site-packages' own hooks, which may import what they like.
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
