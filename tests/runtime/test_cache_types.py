"""Every type of KV cache, from the export to the tokens: close to f32, reproducible to the bit, smaller."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from exporting import uncertified
from fake_backend import generate_together

from pagelet.exporter import export
from pagelet.models.cache import cache_bytes_per_token
from pagelet.models.manifest import Manifest, load_manifest
from pagelet.runtime import Engine, EngineConfig, SamplingParams
from pagelet.runtime.backends.cpu import cache_shape
from pagelet.runtime.backends.cpu_cache import CpuCache, cache_names
from pagelet.tools.evaluate import evaluate, windows
from pagelet.tools.memory import anonymous_rss

TYPES = ("f32", "f16", "int8", "fp8")
TEXT = (Path(__file__).parents[1] / "data" / "tides.txt").read_text(encoding="utf-8")
VOCAB = 320

# Mean KL divergence to the f32 cache, in nats: about three times what was measured (3.8e-7, 6.9e-4, 4.3e-3;
# on 4,000 tokens of another text below 1e-5, 7.8e-4, 4.6e-3).
MAX_KL = {"f16": 2e-6, "int8": 2.5e-3, "fp8": 1.5e-2}


@pytest.fixture(scope="module")
def bundles(make_llama: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny random Llama with each cache type; int4 weights, so that all native ops take part."""
    source, folder = make_llama(), tmp_path_factory.mktemp("bundles")
    for kind in TYPES:
        export(source, folder / kind, uncertified(cache_type=kind, block_size=16))
    return {kind: folder / kind for kind in TYPES}


def prompt_of(length: int, seed: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(2, VOCAB, length).tolist()
    return tokens


def cache_of(manifest: Manifest, num_bytes: int) -> CpuCache:
    layout = cache_shape(manifest, max_step_tokens=64).layout(num_bytes, manifest.spec.max_context)
    return CpuCache(manifest.spec, manifest.cache_type, layout)


@pytest.mark.parametrize("kind", TYPES)
def test_sequences_together_give_what_each_gives_alone(bundles: dict[str, Path], kind: str) -> None:
    params = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.8, seed=5)
    prompts = [prompt_of(1 + 9 * i, seed=i) for i in range(16)]
    with Engine.open(bundles[kind], EngineConfig(kv_memory="16MiB", threads=2, prefix_cache=False)) as engine:
        alone = [engine.generate(prompt, params).token_ids for prompt in prompts]
        logits = [engine.logits(prompt) for prompt in prompts]
    # Little memory and small steps: chunked, batched, preempted, and with hits of the prefix cache.
    manifest = load_manifest(bundles[kind])
    few = 24 * manifest.block_size * cache_bytes_per_token(manifest.spec, kind)
    crowded = EngineConfig(kv_memory=few, threads=1, max_sequences=8, max_step_tokens=24)
    with Engine.open(bundles[kind], crowded) as engine:
        together = generate_together(engine, prompts, params)
        assert [done.token_ids for done in together] == alone
        assert engine.stats().preemptions > 0
        for prompt, expected in zip(prompts, logits, strict=True):
            np.testing.assert_array_equal(engine.logits(prompt), expected)


def test_logits_are_those_of_the_type(bundles: dict[str, Path]) -> None:
    """No type is silently another: each differs from each, and the finer the closer to f32."""
    logits = {}
    for kind, bundle in bundles.items():
        with Engine.open(bundle, EngineConfig(kv_memory="4MiB")) as engine:
            logits[kind] = engine.logits(prompt_of(300, seed=0))
    errors = [float(np.abs(logits[kind] - logits["f32"]).mean()) for kind in TYPES]
    assert errors == sorted(errors)
    assert len(set(errors)) == len(TYPES)


@pytest.mark.parametrize("kind", TYPES)
def test_the_manifest_and_the_memory_say_the_same(bundles: dict[str, Path], kind: str) -> None:
    manifest = load_manifest(bundles[kind])
    assert manifest.cache_type == kind
    per_token = cache_bytes_per_token(manifest.spec, kind)
    cache = cache_of(manifest, 1 << 20)
    assert [array.name for array in cache.arrays] == [name for name, _, _ in cache_names(manifest.spec, kind)]
    tokens = cache.arrays[0].memory[..., 0, 0].size
    assert sum(array.memory.nbytes for array in cache.arrays) == tokens * per_token
    with Engine.open(bundles[kind], EngineConfig(kv_memory=1 << 20)) as engine:
        stats = engine.stats()
        assert stats.kv_bytes == stats.blocks_total * stats.block_size * per_token
        assert stats.blocks_total == (1 << 20) // (manifest.block_size * per_token)


FILL_A_CACHE = """
import sys
from pathlib import Path
from pagelet.models.cache import cache_bytes_per_token
from pagelet.models.manifest import load_manifest
from pagelet.runtime.backends.cpu_cache import CpuCache, cache_shape
from pagelet.tools.memory import anonymous_rss

manifest = load_manifest(Path(sys.argv[1]))
num_bytes = 100_000 * cache_bytes_per_token(manifest.spec, manifest.cache_type)
layout = cache_shape(manifest, 64).layout(num_bytes, manifest.spec.max_context)
before = anonymous_rss()
cache = CpuCache(manifest.spec, manifest.cache_type, layout)
allocated = anonymous_rss() - before
for array in cache.arrays:
    array.memory.fill(1)
print(allocated, anonymous_rss() - before)
"""


@pytest.mark.skipif(not anonymous_rss(), reason="the system does not say how much memory is resident")
@pytest.mark.parametrize(("kind", "bytes_per_head"), [("f32", 64), ("f16", 32), ("int8", 20), ("fp8", 20)])
def test_memory_of_the_process(bundles: dict[str, Path], kind: str, bytes_per_head: int) -> None:
    spec = load_manifest(bundles[kind]).spec
    assert {layer.head_dim for layer in spec.layers} == {16}
    command = [sys.executable, "-c", FILL_A_CACHE, str(bundles[kind])]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    allocated, filled = map(int, done.stdout.split())
    expected = 100_000 * 2 * spec.num_layers * spec.layers[0].num_kv_heads * bytes_per_head
    assert filled == pytest.approx(expected, rel=0.02)  # pages, and the last block
    assert allocated < 0.02 * expected  # nothing until it is written


@pytest.mark.parametrize("kind", TYPES)
def test_copied_blocks_have_their_scales(bundles: dict[str, Path], kind: str) -> None:
    cache, rng = cache_of(load_manifest(bundles[kind]), 1 << 20), np.random.default_rng(0)
    for array in cache.arrays:
        array.memory[3] = rng.integers(1, 100, array.memory.shape[1:])
    cache.copy_blocks(0, [(3, 7)])
    for array in cache.arrays:
        np.testing.assert_array_equal(array.memory[7], array.memory[3])
        assert not array.memory[8].any()


@pytest.fixture(scope="module")
def smollm2_f32(smollm2_fp32: Path) -> Iterator[Engine]:
    with Engine.open(smollm2_fp32, EngineConfig(kv_memory="64MiB")) as engine:
        yield engine


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(MAX_KL))
def test_smollm2_is_close_to_its_f32_cache(
    smollm2_gguf: Path, smollm2_f32: Engine, tmp_path: Path, kind: str
) -> None:
    # Float32 weights: beside int4 ones, whose activations have 8 bits, any difference moves some of those.
    export(smollm2_gguf, tmp_path / kind, uncertified(weights="fp32", cache_type=kind))
    with Engine.open(tmp_path / kind, EngineConfig(kv_memory="64MiB")) as engine:
        pieces = list(windows(engine.tokenizer.encode(TEXT), 512, 1024))
        result = evaluate(engine, pieces, smollm2_f32)
    print(f"\n{kind}: mean KL {result.mean_kl:.2e} nats, perplexity {result.perplexity:.3f}")
    assert result.mean_kl is not None
    assert 0 < result.mean_kl < MAX_KL[kind]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["f16", "int8", "fp8"])
def test_smollm2_sixteen_sequences_together_give_what_each_gives_alone(
    smollm2_gguf: Path, tmp_path: Path, kind: str
) -> None:
    export(smollm2_gguf, tmp_path / kind, uncertified(cache_type=kind))
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    with Engine.open(tmp_path / kind, EngineConfig(kv_memory="128MiB", prefix_cache=False)) as engine:
        ids = engine.tokenizer.encode(TEXT)
        prompts = [
            ids[7 * i : 7 * i + length] for i, length in enumerate([1, 31, 32, 33, 65, 129, 200, 300] * 2)
        ]
        alone = [engine.generate(prompt, params).token_ids for prompt in prompts]
        assert [done.token_ids for done in engine.generate_all(prompts, params)] == alone
