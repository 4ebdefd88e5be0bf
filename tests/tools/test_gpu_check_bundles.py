"""gpu_check of bundles: engines of paper whose attention sees the cache or something else; and the CPU's."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from certified import swap_layers, write_certified
from exporting import uncertified
from fake_cuda import FakeCuda
from fake_tensorrt import FakeAttention, FakeContext, FakeTensorRT, as_gpu_bundle

from pagelet.exporter import export
from pagelet.models.manifest import load_manifest
from pagelet.plugins.cuda_driver import Driver
from pagelet.tools import gpu_check
from pagelet.tools.gpu import bundles
from pagelet.tools.gpu.addresses import WatchedLibrary, check_addresses, open_backend, watch
from pagelet.tools.gpu.bundles import check_bundle, check_generation
from pagelet.tools.gpu.making import check_making
from pagelet.tools.gpu.report import Row
from pagelet.tools.gpu.units import checks, run_one

_ARRAYS = ("key_cache", "value_cache", "key_scale_cache", "value_scale_cache")


@pytest.fixture(scope="module")
def exported(
    make_llama: Callable[..., Path],
    make_windowed: Callable[[int], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("exported")
    export(make_llama(), folder / "llama", uncertified(weights="fp32", cache_type="int8", block_size=8))
    export(
        make_windowed(20), folder / "windowed", uncertified(weights="fp32", cache_type="f16", block_size=8)
    )
    return {name: folder / name for name in ("llama", "windowed")}


class PaperEngine:
    """A backend over a `FakeTensorRT` whose steps call the attention of every layer, right or wrong.

    Args:
        wrong: "" for nothing; "copy": the first layer is given other memory; "swapped": the second layer is
            given the first one's; "silent": nobody is called; "lost": the first layer's keys are not kept;
            "stray": a byte behind them is written.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, bundle: Path, folder: Path, wrong: str) -> None:
        cuda = FakeCuda()
        trt = FakeTensorRT(cuda)
        self.library = WatchedLibrary(SimpleNamespace(run=lambda *call: None))
        execute = FakeContext.execute_async_v3

        def execute_and_call(context: FakeContext, stream_handle: int) -> bool:
            done = execute(context, stream_handle)
            for layer in range(self.manifest.spec.num_layers if wrong != "silent" else 0):
                source = 0 if layer == 1 and wrong == "swapped" else layer
                names = {name: f"{name}.{source}" for name in _ARRAYS}
                tensors = {
                    name: context.addresses[full] for name, full in names.items() if full in context.addresses
                }
                if layer == 0 and wrong == "copy":
                    tensors["key_cache"] += 1 << 20
                self.library.run(None, None, tensors, 0, stream_handle)  # type: ignore[arg-type]
            keys = context.addresses["key_cache.0"]
            if wrong == "lost":
                cuda.enqueue(stream_handle, lambda: cuda.array(keys, (64,), "u1").fill(0))
            if wrong == "stray":
                end = keys + self.manifest.block_size * context.shapes["key_cache.0"][0] * 2 * 16  # int8
                count = len(self.library.seen)
                cuda.enqueue(stream_handle, lambda: cuda.array(end - 1, (1,), "u1").fill(count))
            return done

        monkeypatch.setattr(FakeContext, "execute_async_v3", execute_and_call)
        gpu_folder, self.manifest = as_gpu_bundle(bundle, folder / "gpu")
        self.backend = open_backend(
            gpu_folder, self.manifest, FakeAttention().load, driver=Driver.open(bindings=cuda), trt=trt
        )

    def watch(self) -> tuple[list[str], int]:
        return watch(self.backend, self.manifest, lambda: self.library.seen)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, exported: Any, tmp_path: Path) -> Iterator[Any]:
    opened: list[PaperEngine] = []

    def open_engine(name: str, wrong: str = "") -> PaperEngine:
        opened.append(PaperEngine(monkeypatch, exported[name], tmp_path, wrong))
        return opened[0]

    yield open_engine
    for each in opened:
        each.backend.close()


@pytest.mark.parametrize(("name", "layers"), [("llama", 2), ("windowed", 4)])
def test_attention_that_sees_the_cache(engine: Any, name: str, layers: int) -> None:
    # Prefill, one step of decoding as it is and once more for the graph; then nobody is called.
    assert engine(name).watch() == ([], 3 * layers)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("copy", "prefill: 1 of 2 layers' attention sees other memory than the cache that was bound (0x"),
        ("swapped", "prefill: some layers' attention sees the cache of another layer"),
        ("silent", "prefill: no layer's attention was called"),
        ("lost", "prefill: key_cache.0: 2 of 40 new tokens are not there"),
        ("stray", "prefill: key_cache.0: 1 other slots changed"),
    ],
)
def test_attention_that_sees_something_else(engine: Any, wrong: str, said: str) -> None:
    problems, _ = engine("llama", wrong).watch()
    assert problems[0].startswith(said), problems
    assert any(problem.startswith("decoding step 1: ") for problem in problems) == (wrong != "lost")


def test_a_bundle_without_a_plugin_is_skipped(exported: dict[str, Path]) -> None:
    assert check_addresses(exported["llama"]) == Row(
        "addresses/llama", "skipped", "the target cpu has no attention plugin"
    )


# What a bundle computes: the CPU's go the same way


@pytest.fixture(scope="module")
def certified(make_llama: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    bundle = tmp_path_factory.mktemp("certified") / "bundle"
    write_certified(make_llama(), bundle, uncertified(weights="fp32", cache_type="f32"))
    return bundle


def test_a_bundle_that_computes_what_it_should(certified: Path) -> None:
    assert list(checks([certified]))[-3:] == [
        "addresses/bundle",
        "bundle/bundle/verify",
        "bundle/bundle/generate",
    ]
    verified, generated = check_bundle(certified), check_generation(certified, new_tokens=12)
    assert (verified.status, verified.figures["status"]) == ("ok", "match"), verified
    assert generated.status == "ok", generated
    assert generated.figures["shortfall"] == 0
    # Of three; the positions of one do not follow one another.
    assert generated.figures["golden"] == generated.figures["golden_agreed"] == 2
    assert generated.figures["decode_tokens_per_second"] > 0  # type: ignore[operator]
    assert generated.figures["prefill_tokens_per_second"] > 0  # type: ignore[operator]


def test_a_bundle_that_does_not(certified: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(certified, copy)
    swap_layers(copy, 0, 1)
    verified, generated = check_bundle(copy), check_generation(copy, new_tokens=4)
    assert verified.status == generated.status == "failed"
    assert "is broken: from layers.0.attention on" in verified.detail
    assert "golden prompt 0 goes on with token" in generated.detail


def test_decoding_and_prefill_that_disagree(certified: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if decoding had chosen the tokens of another prompt."""
    shortfall = bundles._shortfall
    monkeypatch.setattr(
        bundles, "_shortfall", lambda engine, prompt, done: shortfall(engine, prompt[::-1], done)
    )
    row = check_generation(certified, new_tokens=4)
    assert row.status == "failed"
    assert "below the largest that prefill computes; 0 is allowed" in row.detail


# A bundle that is made on the spot


def test_a_tiny_bundle_is_made(tmp_path: Path) -> None:
    bundle = tmp_path / "cuda"
    assert check_making("cuda", 90, bundle) == Row("make/cuda", "ok", "a tiny model, exported")
    manifest = load_manifest(bundle)
    assert (manifest.target, manifest.certificate) == ("cuda", "certificate.json")


def test_what_was_not_made_is_skipped(tmp_path: Path) -> None:
    known = checks([], [tmp_path / "rtx"])
    names = [name for name in known if name.split("/")[0] in ("make", "addresses", "bundle")]
    assert names == ["make/rtx", "addresses/rtx", "bundle/rtx/verify", "bundle/rtx/generate"]
    gpu: Any = SimpleNamespace(driver=SimpleNamespace(compute_capability=90))
    failed, *skipped = (run_one(name, known[name], gpu) for name in names)
    assert failed.status == "failed"  # TensorRT-RTX builds nothing for SM 90
    assert "rtx" in failed.detail
    assert {(row.status, row.detail) for row in skipped} == {("skipped", "it was not made")}


def test_bundles_that_are_made_are_run_whatever_else_is_asked() -> None:
    args = gpu_check._parser().parse_args(["--make", "rtx,cuda", "--into", "x", "--only", "graph"])
    assert gpu_check._made(args) == [Path("x/rtx"), Path("x/cuda")]
    names = [name for name in checks([], gpu_check._made(args)) if gpu_check._is_asked(name, args.only)]
    assert names == ["graph", "make/rtx", "make/cuda"]
    assert gpu_check._command(args, None)[3:] == ["--worker", "--make", "rtx,cuda", "--into", "x"]
