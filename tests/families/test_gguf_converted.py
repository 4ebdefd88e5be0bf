"""GGUF files that llama.cpp's own converter wrote have transformers' logits; skipped where there is none."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exporting import uncertified
from families.conftest import write_family
from families.gguf_rows import GGUF_ROWS, OLDER_CONFIG
from families.test_logits import TOLERANCE, reference
from families.written_gguf import write_merging_tokenizer

from pagelet.exporter import export
from pagelet.runtime import Engine, EngineConfig

pytestmark = pytest.mark.slow  # a minute to make and convert them all
ROOT = Path(__file__).parents[2]
Converted = tuple[Path, Any]


def llama_cpp() -> Path | None:
    """The folder of llama.cpp's sources with the converter, as llama-cpp-python's source package has it."""
    given = os.environ.get("PAGELET_LLAMA_CPP")
    found = [Path(given)] if given else sorted(ROOT.glob("downloads/llama_cpp_python-*/vendor/llama.cpp"))
    return found[-1] if found and (found[-1] / "convert_hf_to_gguf.py").exists() else None


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Converted]:
    """Every row's GGUF file and transformers' logits, by its name; converted in one go."""
    home = llama_cpp()
    if home is None:
        pytest.skip(
            "llama.cpp's sources are not there: unpack llama-cpp-python's source package in downloads/"
        )
    folder = tmp_path_factory.mktemp("converted")
    rows, paths = {}, []
    for number, (name, row) in enumerate(GGUF_ROWS.items()):
        source, file = folder / str(number), folder / f"{number}.gguf"
        model = write_family(row, source)
        write_merging_tokenizer(source)
        path = source / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | OLDER_CONFIG.get(row.kind, {})))
        rows[name] = file, reference(model, ids(name))
        paths += [source, file]
    driver = Path(__file__).with_name("convert_gguf.py")
    done = subprocess.run([sys.executable, driver, home, *paths], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return rows


def ids(name: str) -> list[int]:
    return np.random.default_rng(1).integers(2, 258, (GGUF_ROWS[name].max_context or 200) - 4).tolist()


@pytest.mark.parametrize("name", GGUF_ROWS)
def test_a_converted_file_equals_transformers(
    name: str, converted: dict[str, Converted], tmp_path: Path
) -> None:
    file, expected = converted[name]
    options = uncertified(weights="fp32", cache_type="f32", max_context=GGUF_ROWS[name].max_context)
    export(file, tmp_path / "bundle", options)
    with Engine.open(tmp_path / "bundle", EngineConfig(kv_memory="16MiB")) as engine:
        spread = max(float(expected.std()), 1.0)
        assert np.abs(engine.logits(ids(name)) - expected).max() <= TOLERANCE * spread
