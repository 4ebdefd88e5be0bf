"""`replay` says match right after the export, and names the layer of every fault that hashes cannot see."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from certified import (
    VOCAB,
    double_a_scale,
    edit_graph,
    edit_weight,
    rehash,
    swap_layers,
    write_certified,
    wrong_epsilon,
    wrong_rope_base,
)
from safetensors.numpy import load_file, save_file

from pagelet.exporter import ExportOptions
from pagelet.models.certificate import load_certificate
from pagelet.models.errors import BundleError
from pagelet.models.manifest import load_manifest
from pagelet.plugins import native
from pagelet.runtime import Engine, EngineConfig
from pagelet.runtime.verification import FLOAT_TOLERANCE, Verification, replay

LAYERS = 3
SMALL = EngineConfig(kv_memory="1MiB", threads=2)


@pytest.fixture(scope="module")
def source(make_llama: Callable[..., Path]) -> Path:
    # Beside a random model's large activations the usual 1e-5 would vanish in the rounding.
    return make_llama(num_hidden_layers=LAYERS, rms_norm_eps=1e-2)


@pytest.fixture(scope="module")
def int4(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    bundle = tmp_path_factory.mktemp("certified") / "int4"
    write_certified(source, bundle, ExportOptions())
    return bundle


@pytest.fixture
def damaged(int4: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return shutil.copytree(int4, tmp_path / "damaged")


def verify(bundle: Path) -> Verification:
    return replay(bundle, load_manifest(bundle), threads=2)


@pytest.mark.parametrize("cache_type", ["f32", "f16", "int8", "fp8"])
@pytest.mark.parametrize("weights", ["fp32", "int4", "fp8"])
def test_match_right_after_the_export(source: Path, weights: str, cache_type: str, tmp_path: Path) -> None:
    certificate = write_certified(
        source, tmp_path / "b", ExportOptions(weights=weights, cache_type=cache_type, block_size=8)
    )
    found = verify(tmp_path / "b")
    assert (found.status, found.first_difference, found.deviation) == ("match", "", 0.0)
    assert found.arithmetic == found.certified_arithmetic == native.kernel_arithmetic()
    assert found.agreement == found.certified_agreement == certificate.agreement
    for threads in (1, 3):
        again = replay(tmp_path / "b", load_manifest(tmp_path / "b"), threads)
        assert replace(again, seconds=0.0) == replace(found, seconds=0.0)


def test_match_with_windows(make_windowed: Callable[[int], Path], tmp_path: Path) -> None:
    write_certified(make_windowed(8), tmp_path / "b", ExportOptions(block_size=4))
    assert len(load_manifest(tmp_path / "b").spec.window_groups) == 2
    assert verify(tmp_path / "b").status == "match"


def test_engine_opens_what_it_verified(int4: Path) -> None:
    seen: list[tuple[str, float]] = []
    Engine.open(int4, SMALL, verify=True, on_progress=lambda *step: seen.append(step)).close()
    fractions = [fraction for stage, fraction in seen if stage == "verify"]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0


def fault_swapped(bundle: Path) -> None:
    swap_layers(bundle, 1, 2)


def fault_epsilon_of_attention(bundle: Path) -> None:
    wrong_epsilon(bundle, "/layers.2/attention/qkv")


def fault_epsilon_of_mlp(bundle: Path) -> None:
    wrong_epsilon(bundle, "/layers.1/mlp/gate_up")


def fault_epsilon_of_head(bundle: Path) -> None:
    wrong_epsilon(bundle, "/head")


def fault_scale_of_o(bundle: Path) -> None:
    double_a_scale(bundle, "layers.1.attention.o.weight")


def fault_scale_of_down(bundle: Path) -> None:
    double_a_scale(bundle, "layers.2.mlp.down.weight")


@pytest.mark.parametrize(
    ("fault", "where"),
    [
        (fault_swapped, "layers.1.attention"),
        (wrong_rope_base, "layers.0.attention"),
        (fault_epsilon_of_attention, "layers.2.attention"),
        (fault_epsilon_of_mlp, "layers.1.mlp"),
        (fault_epsilon_of_head, "head"),
        (fault_scale_of_o, "layers.1.attention"),
        (fault_scale_of_down, "layers.2.mlp"),
    ],
)
def test_a_fault_is_found_where_it_is(fault: Callable[[Path], None], where: str, damaged: Path) -> None:
    fault(damaged)
    found = verify(damaged)
    assert (found.status, found.first_difference) == ("broken", where)
    assert found.deviation > 0
    with pytest.raises(BundleError, match=f"is broken: from {where} on it computes other numbers"):
        Engine.open(damaged, SMALL, verify=True)
    Engine.open(damaged, SMALL).close()  # the files are whole; only verifying takes a look


@pytest.mark.parametrize(("module", "where"), [("attention.o", "attention"), ("mlp.down", "mlp")])
def test_a_transposed_weight(source: Path, damaged: Path, module: str, where: str, tmp_path: Path) -> None:
    """Packed as an exporter would that reads [in, out] as [out, in]."""
    name = {"attention.o": "self_attn.o_proj", "mlp.down": "mlp.down_proj"}[module]
    shutil.copytree(source, tmp_path / "transposed")
    path = tmp_path / "transposed" / "model.safetensors"
    tensors = load_file(path)
    weight = tensors[f"model.layers.1.{name}.weight"]
    tensors[f"model.layers.1.{name}.weight"] = np.ascontiguousarray(weight.T).reshape(weight.shape)
    save_file(tensors, path, {"format": "pt"})
    write_certified(tmp_path / "transposed", tmp_path / "other", ExportOptions())
    key = f"layers.1.{module}.weight"
    found: list[Any] = []
    edit_weight(tmp_path / "other", key, lambda data: found.append(data.copy()))
    edit_weight(damaged, key, lambda data: data.__setitem__(slice(None), found[0]))
    rehash(damaged)
    assert verify(damaged).first_difference == f"layers.1.{where}"


def test_a_head_that_differs_for_one_rare_token(make_llama: Callable[..., Path], tmp_path: Path) -> None:
    """The largest logits stay as they are; the hash over all of them does not."""
    write_certified(make_llama(), tmp_path / "b", ExportOptions(weights="fp32", cache_type="f32"))
    certificate = load_certificate(tmp_path / "b", load_manifest(tmp_path / "b"))
    assert certificate is not None
    likely = {token for prompt in certificate.golden for top in prompt.top for token in top.ids}
    rare = next(token for token in range(VOCAB) if token not in likely)
    inputs = 64

    def weaken(data: Any) -> None:
        tiles = data.view(np.float32).reshape(-1, inputs, 16)
        tiles[rare // 16, :, rare % 16] *= 0.99

    edit_weight(tmp_path / "b", "head.weight", weaken)
    rehash(tmp_path / "b")
    found = verify(tmp_path / "b")
    assert (found.status, found.first_difference) == ("broken", "head")


def test_numbers_that_are_not_finite(damaged: Path) -> None:
    def poison(data: Any) -> None:
        data.view(np.float32)[:] = np.nan

    edit_weight(damaged, "layers.2.attention.norm.weight", poison)
    rehash(damaged)
    found = verify(damaged)
    assert (found.status, found.first_difference) == ("broken", "layers.2.attention")
    assert json.loads(json.dumps(found.to_json(), allow_nan=False))["deviation"] is None


def test_a_graph_that_is_not_the_certificates(damaged: Path) -> None:
    def rename(graph: Any) -> None:
        for node in graph.node:
            node.input[:] = [name.replace("/layers.1/attention/o", "x") for name in node.input]
            node.output[:] = [name.replace("/layers.1/attention/o", "x") for name in node.output]

    edit_graph(damaged, rename)
    rehash(damaged)
    with pytest.raises(BundleError, match="cannot be replayed, or is not what the certificate is of"):
        verify(damaged)


def test_a_bundle_without_a_certificate_is_unproven(damaged: Path) -> None:
    manifest = load_manifest(damaged)
    replace(manifest, certificate="").save(damaged)
    found = verify(damaged)
    assert found.status == "unproven"
    assert "what it computes was not checked" in found.explanation
    Engine.open(damaged, SMALL, verify=True).close()


def on_portable(bundle: Path) -> dict[str, Any]:
    """What the kernels without fused multiply-adds find."""
    code = (
        "import json, sys; from pathlib import Path; from pagelet.models.manifest import load_manifest;"
        "from pagelet.runtime.verification import replay; bundle = Path(sys.argv[1]);"
        "print(json.dumps(replay(bundle, load_manifest(bundle), 1).to_json()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(bundle)],
        env=os.environ | {"PAGELET_ISA": "portable"},
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.skipif(native.selected_isa() == "portable", reason="certifies with what it would verify with")
def test_other_arithmetic_drifts(source: Path, int4: Path, tmp_path: Path) -> None:
    found = on_portable(int4)
    assert found["status"] == "drift"
    assert found["arithmetic"] != found["certified_arithmetic"]
    assert 0 < found["deviation"] < found["tolerance"]
    write_certified(source, tmp_path / "fp32", ExportOptions(weights="fp32", cache_type="f32"))
    found = on_portable(tmp_path / "fp32")
    assert found["status"] == "drift"
    assert found["deviation"] < found["tolerance"] == FLOAT_TOLERANCE[1]


@pytest.mark.skipif(native.selected_isa() == "portable", reason="certifies with what it would verify with")
@pytest.mark.parametrize(
    ("fault", "where"), [(fault_swapped, "layers.1.attention"), (wrong_rope_base, "layers.0.attention")]
)
def test_other_arithmetic_is_no_excuse(fault: Callable[[Path], None], where: str, damaged: Path) -> None:
    fault(damaged)
    found = on_portable(damaged)
    assert (found["status"], found["first_difference"]) == ("broken", where)


def test_every_instruction_set_has_an_arithmetic() -> None:
    for isa in native.available_isas():
        code = "from pagelet.plugins import native; print(native.kernel_arithmetic())"
        environment = os.environ | {"PAGELET_ISA": isa}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
        )
        kind, width = done.stdout.strip().split("-")
        assert kind == ("rounded" if isa == "portable" else "fused")
        assert int(width.split(".")[0]) in (4, 8, 16)
