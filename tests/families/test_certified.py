"""Whole exports of families that hand more than a residual stream from layer to layer, or route it."""

from hashlib import sha256
from pathlib import Path

import pytest
from families.conftest import MakeFamily
from families.rows import ROWS

from pagelet.exporter import ExportOptions, export
from pagelet.models.manifest import load_manifest
from pagelet.runtime.verification import replay


@pytest.fixture(scope="module")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("calibration") / "text.txt"
    path.write_text("".join(f"The {n}th of {n * n % 97} steps, and {n % 7} more. " for n in range(40)))
    return path


@pytest.mark.parametrize(
    ("name", "quantizer"),
    [
        ("gemma4", "gptq"),
        ("gemma4", "auto"),
        ("gpt_oss", "gptq"),
        ("gpt2", "awq"),
        ("qwen3_moe mixed", "auto"),
    ],
)
def test_every_quantizer_ends_in_a_bundle_that_replays(
    name: str, quantizer: str, make_family: MakeFamily, calibration: Path, tmp_path: Path
) -> None:
    folder, _ = make_family(ROWS[name])
    given = {"bits_per_weight": 5.5} if quantizer == "auto" else {}
    options = ExportOptions(
        quantizer=quantizer,
        calibration=calibration,
        calibration_tokens=1024,
        cache_type="int8",
        certificate_seconds=1,
        accept_loss=True,  # random weights in four bits are far from what they were
        **given,
    )
    manifest = export(folder, tmp_path / "b", options)
    assert all(entry.error < 0.2 for entry in manifest.tensors.values())
    assert replay(tmp_path / "b", load_manifest(tmp_path / "b")).status == "match"


@pytest.mark.parametrize("layer", [3, 6])
def test_a_cut_export_of_shared_caches_goes_on(
    layer: int, make_family: MakeFamily, calibration: Path, tmp_path: Path
) -> None:
    """At a layer whose keys others read, and at one that reads them."""
    folder, _ = make_family(ROWS["gemma4"])
    options = ExportOptions(
        quantizer="gptq", calibration=calibration, calibration_tokens=1024, certificate_seconds=None
    )

    def interrupt(done: int, total: int, name: str) -> None:
        assert 0 <= done <= total
        if name == f"layers.{layer}.mlp.down":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export(folder, tmp_path / "b", options, on_progress=interrupt)
    steps: list[str] = []
    export(folder, tmp_path / "b", options, on_progress=lambda done, total, name: steps.append(name))
    assert "embedding" not in steps
    export(folder, tmp_path / "uncut", options)
    cut, uncut = (
        {path.name: sha256(path.read_bytes()).hexdigest() for path in (tmp_path / name).iterdir()}
        for name in ("b", "uncut")
    )
    assert cut == uncut
