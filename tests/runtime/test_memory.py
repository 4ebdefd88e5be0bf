"""What a process holds: the weights' pages are the file's own, the cache's are those of its blocks."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from exporting import uncertified

from pagelet.exporter import export
from pagelet.tools.memory import anonymous_rss

pytestmark = pytest.mark.skipif(not anonymous_rss(), reason="the system does not say how much is resident")

# Two engines over one bundle; then, in a second process, the same again while the first has them open.
TWO_ENGINES = """
import json, subprocess, sys
from pagelet.runtime import Engine, EngineConfig, SamplingParams
from pagelet.tools.memory import anonymous_rss, mapped

bundle, depth, config = sys.argv[1], int(sys.argv[2]), EngineConfig(kv_memory="32MiB")
params = SamplingParams(max_tokens=4, ignore_eos=True)
before = anonymous_rss()
engines = [Engine.open(bundle, config) for _ in range(2)]
for engine in engines:
    engine.generate(list(range(5, 40)), params)
found = {"anonymous": anonymous_rss() - before}
if depth:
    command = [sys.executable, "-c", sys.argv[3], bundle, "0", ""]
    found["inner"] = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
print(json.dumps(found | mapped("model.weights")))
"""

GENERATE = """
import ctypes
import sys
from pagelet.runtime import Engine, EngineConfig, SamplingParams
from pagelet.tools.memory import rss

config = EngineConfig(kv_memory="512MiB", prefix_cache=False, speculate=sys.argv[3])
with Engine.open(sys.argv[1], config) as engine:
    prompts = [[11 * index + sequence for index in range(512)] for sequence in range(int(sys.argv[2]))]
    engine.generate_all(prompts, SamplingParams(max_tokens=64, ignore_eos=True))
    stats = engine.stats()
    # Up to 8 MB of the heap's end are free, or not, as its pieces happened to lie: what is in use counts.
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)
    print(rss(), stats.peak_blocks_used * stats.kv_bytes // stats.blocks_total)
"""

TOUCH_BLOCKS = """
import sys
from dataclasses import replace
from pathlib import Path
from pagelet.models.manifest import load_manifest
from pagelet.runtime.backends.cpu_cache import CpuCache
from pagelet.runtime.cache_layout import CacheShape
from pagelet.tools.memory import anonymous_rss

spec = load_manifest(Path(sys.argv[1])).spec
spec = replace(spec, layers=spec.layers[:1] * 40)
layout = CacheShape.of(spec, "int8", 32, 64).layout(1 << 30, 1 << 20)
cache = CpuCache(spec, "int8", layout)
before = anonymous_rss()
for array in cache.arrays:
    array.memory[:5] = 1
print(anonymous_rss() - before, 5 * layout.groups[0].block_bytes)
"""


def run(code: str, *arguments: object) -> str:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout


@pytest.mark.slow
def test_engines_and_processes_share_the_pages_of_the_weights(smollm2_int4: Path) -> None:
    size = (smollm2_int4 / "model.weights").stat().st_size
    outer = json.loads(run(TWO_ENGINES, smollm2_int4, 1, TWO_ENGINES))
    for found in (outer, outer["inner"]):
        # Both engines have read nearly all of it, and no page was copied to be written.
        assert found["rss"] > 1.8 * size
        assert found["anonymous_pages"] == 0
        # Nor is there a copy elsewhere: beside the weights an engine takes a tokenizer and some activations.
        assert found["anonymous"] < size
    # Each page counts once, divided by those who map it: four engines here.
    assert outer["inner"]["pss"] < 0.6 * size


@pytest.mark.slow
@pytest.mark.parametrize("sequences", [1, 8])
@pytest.mark.parametrize("speculate", ["off", "auto"])
def test_a_process_that_decodes_holds_little_beside_weights_and_cache(
    smollm2_int4: Path, sequences: int, speculate: str
) -> None:
    bundle = sum(file.stat().st_size for file in smollm2_int4.iterdir())
    resident, cache = map(int, run(GENERATE, smollm2_int4, sequences, speculate).split())
    # Guesses take 64 more rows of logits, and what each text's automaton and a longer step hold.
    guesses = 64 * 49_152 * 4 + 10e6 if speculate == "auto" else 0
    # 60 MB is the aim; 20 more for libraries of other versions, and pages of theirs that happen to be there.
    assert resident < 1.25 * bundle + cache + 80e6 + guesses


def test_a_few_blocks_take_the_pages_of_these_blocks(make_llama: Callable[..., Path], tmp_path: Path) -> None:
    """Whether pages have 4 KiB or 2 MiB: 160 arrays with a large page each would be 320 MiB."""
    export(make_llama(), tmp_path / "bundle", uncertified(cache_type="int8"))
    touched, blocks = map(int, run(TOUCH_BLOCKS, tmp_path / "bundle").split())
    # Two regions, codes and scales, each with up to a large page too much at its end.
    assert blocks * 0.98 < touched < blocks + (6 << 20)
