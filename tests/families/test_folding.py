"""AWQ's scales cancel in every family, and a family's layers give one by one what they give together."""

from pathlib import Path

import numpy as np
import pytest
from exporting import uncertified
from families.conftest import MakeFamily
from families.rows import ONE_EACH, ROWS
from folding import CACHE, TEXTS, folded, logits_of, random_scales, unfolded

from pagelet.exporter import export
from pagelet.exporter.checkpoint import open_checkpoint
from pagelet.exporter.quantize import quantizer as quantizers
from pagelet.exporter.quantize.awq import foldable
from pagelet.runtime import Engine, EngineConfig
from pagelet.tools.quality.layers import bundle_part


@pytest.mark.parametrize("name", ONE_EACH)
def test_folded_scales_change_nothing(
    name: str, make_family: MakeFamily, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantizers, "search_input_scales", random_scales(3))
    folder, _ = make_family(ROWS[name])
    with open_checkpoint(folder) as checkpoint:
        expected = unfolded(checkpoint, tmp_path / "plain")
        found, plans = folded(checkpoint, tmp_path / "folded")
        for layer, plan in enumerate(plans):
            scaled = {module for module, each in plan.treatments.items() if each.input_scales is not None}
            assert scaled == foldable(checkpoint.spec, layer).keys()
    # Two roundings of float32 for each weight and norm, as a share of what logits are.
    assert np.abs(found - expected).max() <= 1e-4 * max(np.abs(expected).max(), 1)


@pytest.mark.parametrize("name", ONE_EACH)
def test_layer_by_layer_gives_the_engines_logits_to_the_bit(
    name: str, make_family: MakeFamily, tmp_path: Path
) -> None:
    folder, _ = make_family(ROWS[name])
    export(folder, tmp_path / "bundle", uncertified(weights="int8", cache_type="f32"))
    found = logits_of(bundle_part(tmp_path / "bundle"), TEXTS, CACHE)
    with Engine.open(tmp_path / "bundle", EngineConfig(kv_memory="16MiB")) as engine:
        np.testing.assert_array_equal(found, np.concatenate([engine.logits(text) for text in TEXTS]))
