"""Each family's logits are transformers': in prefill, across windows and scalings, and token by token.

With PAGELET_REPORT=FILE in the environment, FILE gets a line for each row: how far they are apart.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exporting import uncertified
from families.conftest import MakeFamily
from families.rows import ROWS, Row

from pagelet.exporter import export
from pagelet.runtime import Engine, EngineConfig
from pagelet.tools.invariance import Stepper

# Some hundred float32 products summed in another order; a wrong weight, norm or angle is off by 0.1 and up.
TOLERANCE = 1e-3


def reference(model: Any, ids: list[int]) -> np.ndarray[Any, Any]:
    with torch.no_grad():
        return np.asarray(model(torch.tensor([ids])).logits[0])


def export_fp32(folder: Path, out: Path, row: Row) -> None:
    export(folder, out, uncertified(weights="fp32", cache_type="f32", max_context=row.max_context))


@pytest.mark.parametrize("name", ROWS)
def test_fp32_equals_transformers(name: str, make_family: MakeFamily, tmp_path: Path) -> None:
    row = ROWS[name]
    folder, model = make_family(row)
    export_fp32(folder, tmp_path / "bundle", row)
    ids = np.random.default_rng(1).integers(2, 258, (row.max_context or 200) - 4).tolist()
    expected = reference(model, ids)
    with Engine.open(tmp_path / "bundle", EngineConfig(kv_memory="16MiB")) as engine:
        assert np.abs(engine.logits(ids) - expected).max() <= TOLERANCE
    # Token by token through the paged cache: the same logits, to the bit.
    with Stepper(tmp_path / "bundle", num_blocks=64, max_rows=256) as stepper:
        whole = stepper.logits_in_pieces(ids, [])
        assert np.abs(whole - expected).max() <= TOLERANCE
        assert np.array_equal(stepper.logits_in_pieces(ids, list(range(40, len(ids)))), whole)
    if report := os.environ.get("PAGELET_REPORT"):
        with Path(report).open("a") as lines:
            difference = np.abs(whole - expected).max()
            print(f"| {name} | {expected.std():.2f} | {difference:.1e} |", file=lines)
