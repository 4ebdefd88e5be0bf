"""Whole exports for GPUs, and the engine's place in a bundle; real engines, built without a GPU."""

import json
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from exporting import uncertified
from numpy.typing import NDArray

from pagelet.exporter import ExportOptions, export
from pagelet.exporter.checkpoint import open_checkpoint
from pagelet.exporter.formats import choose_formats, quantized_again
from pagelet.exporter.stacked_rows import StackedRows
from pagelet.models.certificate import load_certificate
from pagelet.models.errors import BackendError, BundleError, CapacityError, InputError, UnsupportedError
from pagelet.models.manifest import check_files, load_manifest
from pagelet.runtime import Engine, EngineConfig
from pagelet.runtime.engine_building import build_bundle
from pagelet.tools.cli import main

pytestmark = pytest.mark.skipif(
    any(find_spec(package) is None for package in ("triton", "tensorrt_rtx_libs")),
    reason="no Triton or no TensorRT-RTX for this platform",
)

MakeCheckpoint = Callable[..., Path]
WriteGGUF = Callable[..., Path]


@pytest.fixture(scope="module")
def checkpoint(make_llama: MakeCheckpoint) -> Path:
    return make_llama(hidden_size=64, num_attention_heads=4)


@pytest.fixture(scope="module")
def rtx(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with kernels and an engine for two GPUs."""
    out = tmp_path_factory.mktemp("rtx") / "bundle"
    export(checkpoint, out, uncertified(target="rtx", sms=(89, 120)))
    return out


def test_an_rtx_bundle_has_its_engine_and_its_kernels(rtx: Path) -> None:
    manifest = load_manifest(rtx)
    gpu = manifest.gpu
    assert gpu is not None
    assert (manifest.target, gpu.sms, gpu.engine_sms) == ("rtx", (89, 120), (89, 120))
    assert gpu.engine_version.startswith("TensorRT-RTX 1.")
    assert manifest.files[gpu.engine].weights
    assert manifest.files[gpu.engine].bytes > 100_000
    check_files(rtx, manifest, weights=True)
    table = json.loads((rtx / "kernels" / "kernels.json").read_text())
    roles = {kernel["role"] for kernel in table["kernels"].values()}
    assert {"prepare", "prefill", "decode", "merge"} <= roles
    cubins = [name for name in manifest.files if name.endswith(".cubin")]
    assert {Path(name).parent.name for name in cubins} == {"sm_89", "sm_120"}
    assert not (rtx / "model.weights").exists()
    assert not list(rtx.glob(".*"))


def test_the_networks_inputs_outputs_and_aliases(rtx: Path) -> None:
    graph = onnx.load(rtx / "model.onnx", load_external_data=False).graph
    inputs = {value.name: value.type.tensor_type for value in graph.input}
    outputs = [value.name for value in graph.output]
    caches = [f"{kind}_cache.{layer}" for layer in range(2) for kind in ("key", "value")]
    assert set(inputs) == {
        "input_ids", "position_ids", "cumulative_sequence_length", "past_seqlens", "block_table_0",
        "ancestor_mask", "logits_indices", *caches,
    }  # fmt: skip
    assert outputs == ["logits", *(name.replace("_cache.", "_cache_out.") for name in caches)]
    for layer, node in enumerate(node for node in graph.node if node.op_type == "PagedAttention"):
        assert node.domain == "pagelet"
        assert list(node.input)[1:3] == caches[2 * layer : 2 * layer + 2]
        assert list(node.output)[1:] == outputs[1 + 2 * layer : 3 + 2 * layer]


@pytest.mark.parametrize(
    "options",
    [
        {"weights": "fp8", "sms": (89, 120)},
        {"weights": "bf16", "cache_type": "int8", "sms": (86,)},
        {"cache_type": "fp8", "embedding": "int4", "sms": (120,)},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_real_engines_of_every_kind(options: dict[str, Any], checkpoint: Path, tmp_path: Path) -> None:
    manifest = export(checkpoint, tmp_path / "b", uncertified(target="rtx", **options))
    assert manifest.gpu is not None
    assert manifest.gpu.engine_sms == options["sms"]
    check_files(tmp_path / "b", manifest, weights=True)


def test_the_certificate_is_of_the_devices_roundings(checkpoint: Path, tmp_path: Path) -> None:
    options = ExportOptions(target="rtx", sms=(89,), accept_loss=True, certificate_seconds=5)
    loss = {}
    for name, changed in (
        ("fp16", replace(options, weights="fp16")),
        ("fp8", replace(options, weights="fp8")),
        ("int4", options),
    ):
        manifest = export(checkpoint, tmp_path / name, changed)
        certificate = load_certificate(tmp_path / name, manifest)
        assert certificate is not None
        loss[name] = certificate.quality.mean_kl
    assert loss["fp16"] < 1e-3 < loss["fp8"] < loss["int4"]


def test_a_bundle_for_tensorrt_waits_for_its_device(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "b"
    manifest = export(checkpoint, out, uncertified(target="tensorrt", sms=(87,)))
    assert manifest.gpu is not None
    assert (manifest.gpu.engine, manifest.gpu.sms) == ("", (87,))
    assert main(["build", str(out)]) == 1
    assert "TensorRT builds for the GPU that is here: " in capsys.readouterr().err
    with pytest.raises(BundleError, match="kernels for SM 87, not for SM 89: export it again"):
        build_bundle(out, sm=89)


def test_an_engine_is_built_anew_on_request_alone(rtx: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = load_manifest(rtx)
    with pytest.raises(BundleError, match=r"has an engine for SM 89, 120 by TensorRT-RTX .*--rebuild"):
        build_bundle(rtx)
    assert load_manifest(rtx) == before
    assert before.gpu is not None
    (rtx / before.gpu.engine).write_bytes(b"damaged")
    with pytest.raises(BundleError, match="7 bytes, the manifest says"):
        check_files(rtx, before)
    assert main(["build", str(rtx), "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    after = load_manifest(rtx)
    check_files(rtx, after, weights=True)
    assert made["bytes"] == after.files[made["engine"]].bytes
    assert after.fingerprint == before.fingerprint
    assert [path.name for path in rtx.glob("*.engine")] == [made["engine"]]
    assert list(rtx.glob(".*")) == []
    with pytest.raises(CapacityError, match=r"only \d+ are free"):
        build_bundle(rtx, rebuild=True, workspace=1 << 44)


def test_a_build_that_is_stopped_leaves_the_bundle_as_it_was(rtx: Path) -> None:
    before = load_manifest(rtx)

    def stop(phase: str, done: int, total: int) -> bool:
        return False

    with pytest.raises(BackendError, match="no engine was built"):
        build_bundle(rtx, rebuild=True, on_phase=stop)
    assert load_manifest(rtx) == before
    check_files(rtx, before, weights=True)


def test_a_target_without_an_engine_has_nothing_to_build(checkpoint: Path, tmp_path: Path) -> None:
    export(checkpoint, tmp_path / "b", uncertified())
    with pytest.raises(InputError, match="target 'cpu', which has no engine to build"):
        build_bundle(tmp_path / "b")


@pytest.mark.parametrize("cache_type", ["f16", "int8", "fp8"])
def test_a_cuda_bundle_has_onnx_runtimes_own_ops(cache_type: str, checkpoint: Path, tmp_path: Path) -> None:
    manifest = export(checkpoint, tmp_path / "b", uncertified(target="cuda", cache_type=cache_type))
    assert manifest.gpu is not None
    assert (manifest.gpu.sms, manifest.gpu.kernels, manifest.block_size) == ((), "", 256)
    graph = onnx.load(tmp_path / "b" / "model.onnx", load_external_data=False).graph
    domains = {(node.domain, node.op_type) for node in graph.node if node.domain}
    assert domains == {("com.microsoft", "MatMulNBits"), ("com.microsoft", "PagedAttention")}
    scales = [each for each in graph.initializer if "_scale_cache." in each.name]
    assert len(scales) == (0 if cache_type == "f16" else 4)


@pytest.mark.parametrize("target", ["rtx", "cuda"])
def test_without_a_gpu_opening_says_so_in_one_line(
    target: str, rtx: Path, checkpoint: Path, tmp_path: Path
) -> None:
    bundle = rtx
    if target == "cuda":
        bundle = tmp_path / "b"
        export(checkpoint, bundle, uncertified(target="cuda"))
    try:
        from pagelet.plugins.cuda_driver import Driver

        Driver.open().close()
    except RuntimeError:
        with pytest.raises(BackendError, match=f"target '{target}'.*NVIDIA driver") as error:
            Engine.open(bundle)
        assert "\n" not in str(error.value)
    else:
        pytest.skip("there is a GPU here")


@pytest.mark.parametrize("asked", [{"max_sequences": 33}, {"max_step_tokens": 513}])
def test_more_than_the_engine_was_made_for_is_refused(asked: dict[str, int], rtx: Path) -> None:
    (name,) = asked
    with pytest.raises(CapacityError, match=rf"{name} is \d+, but the engine of .* was made for \d+. Lower"):
        Engine.open(rtx, EngineConfig(**asked))


def test_codes_with_minimums_are_made_symmetric_on_request_alone(
    write_gguf: WriteGGUF, weights: dict[str, NDArray[np.float32]], tmp_path: Path
) -> None:
    options = uncertified(target="rtx", sms=(89,))
    with open_checkpoint(write_gguf(weights, "Q4_1")) as checkpoint:
        with pytest.raises(InputError, match=r"have minimums .*target rtx cannot hold.*--symmetric"):
            choose_formats(options, checkpoint)
        formats = choose_formats(replace(options, symmetric=True), checkpoint)
        notes = list(quantized_again(checkpoint.spec, checkpoint, formats))
    assert any("quantized again: they are int4, groups of 32 with minimum" in note for note in notes)


def test_codes_without_minimums_stay_as_they_are(
    write_gguf: WriteGGUF, weights: dict[str, NDArray[np.float32]], tmp_path: Path
) -> None:
    with open_checkpoint(write_gguf(weights, "Q4_0")) as checkpoint:
        formats = choose_formats(uncertified(target="rtx", sms=(89,)), checkpoint)
        rows = StackedRows(
            checkpoint, ["layers.0.attention.o.weight"], formats.of("layers.0.attention.o"), interleaved=False
        )
    assert rows.exact


def test_heads_without_a_kernel_are_refused_before_any_work(
    make_llama: MakeCheckpoint, tmp_path: Path
) -> None:
    source = make_llama(num_attention_heads=8, num_key_value_heads=2, head_dim=8)
    with pytest.raises(UnsupportedError, match="heads of 8 elements; the attention kernels take multiples"):
        export(source, tmp_path / "b", uncertified(target="rtx", sms=(89,)))


def test_an_export_that_was_stopped_in_its_engine_goes_on(checkpoint: Path, tmp_path: Path) -> None:
    out, options = tmp_path / "b", uncertified(target="rtx", sms=(89,))

    def stop(done: int, total: int, name: str) -> None:
        if name == "engine":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export(checkpoint, out, options, on_progress=stop)
    assert not out.exists()
    notes: list[str] = []
    manifest = export(checkpoint, out, options, on_note=notes.append)
    assert "going on where an earlier export stopped: 2 of 2 layers" in notes
    check_files(out, manifest, weights=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b"]
