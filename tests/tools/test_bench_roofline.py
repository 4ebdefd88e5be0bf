"""The roofline: its arithmetic by hand on real manifests, and its measurements."""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from exporting import uncertified

from pagelet.exporter import export
from pagelet.models.manifest import Manifest, load_manifest
from pagelet.tools import roofline
from pagelet.tools.bench import BenchOptions, bench
from pagelet.tools.cli import common, main
from pagelet.tools.roofline import Roofline, Work, compare, decode_work, prefill_work

# The tiny Llama of the tests: 2 layers, hidden 64, MLP 96, 4 query and 2 KV heads of 16, vocabulary 320.
LAYER_MACS = 2 * (64 * (64 + 32 + 32) + 64 * 64 + 3 * 64 * 96)
HEAD_MACS = 320 * 64
CACHE_VALUES = 2 * 2 * 2 * 16  # of a token: layers × (key, value) × KV heads × head size


@pytest.fixture(scope="module", params=[False, True], ids=["own head", "tied head"])
def manifest(
    request: pytest.FixtureRequest, make_llama: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Manifest:
    bundle = tmp_path_factory.mktemp("bench") / "fp32"
    checkpoint = make_llama(tie_word_embeddings=request.param)
    export(checkpoint, bundle, uncertified(weights="fp32", cache_type="f16"))
    return load_manifest(bundle)


def test_a_decode_step_reads_weights_head_and_cache_once(manifest: Manifest) -> None:
    work = decode_work(manifest, context=10, sequences=1)
    assert work.read_bytes == 4 * (LAYER_MACS + HEAD_MACS) + 10 * 2 * CACHE_VALUES
    assert work.int8_macs == 0
    assert work.float32_macs == LAYER_MACS + HEAD_MACS + 10 * 2 * 2 * 64


def test_sequences_share_the_weights_and_not_the_cache(manifest: Manifest) -> None:
    one, four = (decode_work(manifest, context=10, sequences=count) for count in (1, 4))
    assert four.read_bytes - one.read_bytes == 3 * 10 * 2 * CACHE_VALUES
    assert four.float32_macs == 4 * one.float32_macs


def test_a_prompt_in_one_step_reads_like_a_decode_step_and_its_head_multiplies_once(
    manifest: Manifest,
) -> None:
    work = prefill_work(manifest, prompt_tokens=10, sequences=1, step_tokens=512)
    assert work.read_bytes == decode_work(manifest, 10, 1).read_bytes
    keys = sum(range(1, 11))  # row t sees t tokens
    assert work.float32_macs == 10 * LAYER_MACS + HEAD_MACS + keys * 2 * 2 * 64


def test_each_chunk_reads_the_weights_and_the_cache_so_far(manifest: Manifest) -> None:
    whole = prefill_work(manifest, prompt_tokens=10, sequences=1, step_tokens=10)
    chunked = prefill_work(manifest, prompt_tokens=10, sequences=1, step_tokens=4)
    weights = 4 * (LAYER_MACS + HEAD_MACS)
    assert chunked.read_bytes - whole.read_bytes == 2 * weights + (4 + 8) * 2 * CACHE_VALUES
    assert chunked.float32_macs == whole.float32_macs


def test_integer_weights_count_as_integer_arithmetic(smollm2_int4: Path) -> None:
    manifest = load_manifest(smollm2_int4)
    work = decode_work(manifest, context=576, sequences=1)
    # SmolLM2-135M: 134,515,008 parameters, of which 61 norms of 576 are no matrix.
    assert work.int8_macs == 134_515_008 - 61 * 576
    assert work.float32_macs == 576 * 2 * 30 * 9 * 64
    stored = sum(tensor.bytes for tensor in manifest.tensors.values())
    cache = {"f16": 2, "f32": 4}[manifest.cache_type] * 2 * 30 * 3 * 64
    assert work.read_bytes == stored + 576 * cache


def test_shares_and_the_nearer_limit() -> None:
    machine = Roofline(
        threads=2, read_bytes_per_second=10e9, int8_macs_per_second=100e9, float32_macs_per_second=50e9
    )
    phase = compare(
        Work(read_bytes=50_000_000, int8_macs=100_000_000, float32_macs=50_000_000), 0.01, machine
    )
    assert phase.read_bytes_per_second == 5e9
    assert phase.limits
    assert phase.limits.memory_share == pytest.approx(0.5)
    assert phase.limits.arithmetic_share == pytest.approx(0.1 + 0.1)
    assert phase.limits.next == "memory"
    busy = compare(Work(1, 900_000_000, 0), 0.01, machine)
    assert busy.limits
    assert busy.limits.next == "arithmetic"
    assert compare(Work(1, 1, 1), 1.0, None).limits is None


def test_the_machine_is_within_what_machines_reach() -> None:
    """Bounds for any computer: 0.5 GB/s is below the slowest board's memory, 5 TB/s above any server's."""
    assert 0.5e9 < roofline.read_bandwidth(1) < 5e12
    int8 = roofline.multiply_rate("MatMulInteger", np.uint8, np.int8, 1)
    float32 = roofline.multiply_rate("MatMul", np.float32, np.float32, 1)
    assert 1e8 < float32 < 1e15
    assert 1e8 < int8 < 1e15


def test_bench_reports_what_was_read_per_step(make_llama: Callable[..., Path], tmp_path: Path) -> None:
    bundle = tmp_path / "int4"
    export(make_llama(), bundle, uncertified())
    options = BenchOptions(prompt_tokens=20, new_tokens=4, sequences=2, repeat=2, kv_memory="4MiB", threads=1)
    result = bench(bundle, options, lambda *_: None)
    manifest = load_manifest(bundle)
    assert result.decode
    assert result.decode.work == decode_work(manifest, 22, 2)
    assert result.prefill.work == prefill_work(manifest, 20, 2, 512)
    rate = result.decode.work.read_bytes / result.decode.seconds
    assert result.decode.read_bytes_per_second == rate
    steps = [(run.seconds - run.time_to_first_token_s) / 3 for run in result.runs]
    assert result.decode.seconds == pytest.approx(sum(steps) / 2)
    assert result.roofline
    assert result.roofline.threads == 1
    body = result.to_json()
    assert body["decode"]["limits"]["next"] in ("memory", "arithmetic")
    assert body["roofline"]["read_bytes_per_second"] > 0


def test_the_command_prints_reads_and_limits(
    make_llama: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export(make_llama(), tmp_path / "b", uncertified())
    sizes = ["--prompt-tokens", "8", "--new-tokens", "3", "--repeat", "1", "--kv-memory", "4MiB"]
    assert main(["bench", str(tmp_path / "b"), *sizes]) == 0
    lines = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    work = decode_work(load_manifest(tmp_path / "b"), 9, 1)
    assert lines["decode step reads"].strip().startswith(common.size(work.read_bytes) + " in ")
    assert lines["decode step reads"].endswith(" GB/s")
    assert "MatMulInteger" in lines["limits here"]
    assert lines["prefill reaches"].endswith(("the nearer one: memory", "the nearer one: arithmetic"))
    assert main(["bench", str(tmp_path / "b"), *sizes, "--no-roofline"]) == 0
    assert "not asked for" in capsys.readouterr().out


def test_without_onnx_the_limits_are_left_out(
    make_llama: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    export(make_llama(), tmp_path / "b", uncertified())
    monkeypatch.setitem(sys.modules, "onnx", None)  # what an import finds where it is not installed
    sizes = ["--prompt-tokens", "8", "--new-tokens", "3", "--repeat", "1", "--kv-memory", "4MiB"]
    assert main(["bench", str(tmp_path / "b"), *sizes]) == 0
    out = capsys.readouterr().out
    assert "needs pagelet[export]" in out
    assert "GB/s" in out


def test_a_single_new_token_has_no_decode_step(make_llama: Callable[..., Path], tmp_path: Path) -> None:
    export(make_llama(), tmp_path / "b", uncertified())
    options = BenchOptions(prompt_tokens=8, new_tokens=1, repeat=1, kv_memory="4MiB", roofline=False)
    result = bench(tmp_path / "b", options, lambda *_: None)
    assert result.decode is None
    assert result.roofline is None
    assert result.prefill.limits is None
