"""The arrows between the packages go one way, and the runtime stays lean."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ALLOWED = {
    "models": {"models"},
    "plugins": {"plugins"},
    "exporter": {"exporter", "models", "plugins"},
    "runtime": {"runtime", "models", "plugins"},
    "tools": {"tools", "exporter", "runtime", "models", "plugins"},
}
HEAVY = {"torch", "transformers", "onnx", "onnx_ir", "gguf", "safetensors"}


def imports(path: Path) -> set[str]:
    """Dotted names that a file imports, at its top or inside a function."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
    return found


@pytest.mark.parametrize("package", ALLOWED)
def test_imports_follow_the_layers(package: str) -> None:
    files = list((ROOT / package).rglob("*.py"))
    assert files
    for path in files:
        for name in imports(path):
            parts = name.split(".")
            if parts[0] == "pagelet":
                assert parts[1] in ALLOWED[package], f"{path} imports {name}"
            assert parts[0] not in ALLOWED, f"{path} imports {name} by its folder's name"


@pytest.mark.parametrize("package", ["models", "plugins", "runtime"])
def test_no_heavy_import_in_the_runtime(package: str) -> None:
    for path in (ROOT / package).rglob("*.py"):
        if "kernels" not in path.parts:
            assert not {name.split(".")[0] for name in imports(path)} & HEAVY, path


def test_opening_the_runtime_loads_nothing_heavy() -> None:
    code = f"import sys, pagelet.runtime; print(sorted({HEAVY!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
