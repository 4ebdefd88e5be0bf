"""`pagelet verify` and `pagelet inspect` on bundles with and without a certificate."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from certified import swap_layers, write_certified

from pagelet.exporter import ExportOptions
from pagelet.models.manifest import MANIFEST_NAME
from pagelet.tools.cli import main


@pytest.fixture(scope="module")
def certified(make_llama: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    bundle = tmp_path_factory.mktemp("certified") / "b"
    write_certified(make_llama(), bundle, ExportOptions())
    return bundle


@pytest.fixture
def copy(certified: Path, tmp_path: Path) -> Path:
    return shutil.copytree(certified, tmp_path / "b")


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    status = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def to_version_2(bundle: Path) -> None:
    path = bundle / MANIFEST_NAME
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    data["version"] = 2
    data["spec"] = old_spec(data["spec"])
    del data["certificate"], data["gpu"]
    path.write_text(json.dumps(data), encoding="utf-8")


def old_spec(spec: dict[str, Any]) -> dict[str, Any]:
    """As it was while all layers were alike: tests/models/test_manifest.py has one in full."""
    first = spec["layers"][0]
    kept = ("architecture", "vocab_size", "hidden_size", "max_context", "tie_embeddings")
    return {
        **{key: spec[key] for key in kept},
        **{key: first[key] for key in ("num_kv_heads", "head_dim", "intermediate_size")},
        "num_layers": len(spec["layers"]),
        "num_heads": spec["attention"]["num_heads"],
        "norm_epsilon": spec["norm"]["epsilon"],
        "rope": spec["ropes"][0],
        "attention_bias": spec["attention"]["bias"],
        "mlp_bias": spec["mlp"]["bias"],
    }


def test_verify_says_match(certified: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "verify", certified)
    assert status == 0
    assert "every size and SHA-256 as the manifest says" in out
    assert "match: the bundle computes, to the bit, what it computed when it was exported" in out
    assert "the original's first choice at" in out
    status, out, _ = run(capsys, "verify", certified, "--json", "--threads", 1)
    data = json.loads(out)
    assert (status, data["ok"], data["status"], data["deviation"]) == (0, True, "match", 0.0)


def test_verify_says_broken_and_fails(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    swap_layers(copy, 0, 1)
    status, out, err = run(capsys, "verify", copy)
    assert status == 1
    assert "broken" in out
    assert err.startswith("pagelet: ")
    assert err.count("\n") == 1
    assert "from layers.0.attention on it computes other numbers" in err
    status, out, _ = run(capsys, "verify", copy, "--json")
    data = json.loads(out)
    assert (status, data["ok"], data["first_difference"]) == (1, False, "layers.0.attention")


@pytest.mark.parametrize("name", ["model.weights", "model.onnx", "certificate.json", "certificate.f32"])
def test_verify_finds_a_flipped_byte(copy: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    content = bytearray((copy / name).read_bytes())
    content[len(content) // 2] ^= 1
    (copy / name).write_bytes(content)
    status, _, err = run(capsys, "verify", copy)
    assert status == 1
    assert f"{name} does not have the manifest's SHA-256" in err


def test_a_bundle_without_a_certificate_passes_and_says_so(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    to_version_2(copy)
    status, out, _ = run(capsys, "verify", copy)
    assert status == 0
    assert "unproven: the bundle has no certificate" in out
    data = json.loads(run(capsys, "verify", copy, "--json")[1])
    assert (data["ok"], data["status"]) == (True, "unproven")
    assert "none: made by a pagelet that had none" in run(capsys, "inspect", copy)[1]
    assert json.loads(run(capsys, "inspect", copy, "--json")[1])["quality"] is None


def test_inspect_shows_the_certificate(certified: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "inspect", certified)
    assert status == 0
    stored = json.loads((certified / "certificate.json").read_text(encoding="utf-8"))
    quality = stored["quality"]
    assert f"{quality['reference_perplexity']:.3f} → {quality['perplexity']:.3f}" in out
    assert f"mean {quality['mean_kl']:.5f} nats" in out
    worst = max(stored["layers"], key=lambda layer: layer["error"])
    assert f"{worst['layer']} ({worst['error']:.2%})" in out
    data = json.loads(run(capsys, "inspect", certified, "--json")[1])
    assert data["quality"]["mean_kl"] == quality["mean_kl"]
    assert data["quality"]["worst_layers"][0]["layer"] == worst["layer"]
