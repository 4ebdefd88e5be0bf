"""Trees of drafted tokens in the CPU backend: what is accepted goes on as plain decoding does, to the bit."""

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from exporting import uncertified
from numpy.typing import NDArray

from pagelet.exporter import export
from pagelet.models.errors import BackendError
from pagelet.models.manifest import load_manifest
from pagelet.runtime.backends import StepBatch
from pagelet.runtime.backends.cpu import CpuBackend, cache_shape

BLOCK_SIZE = 8
PARENTS = [-1, 0, 0, 2, 1, 3, 3, -1, 6]  # rows 0, 2, 3, 6, 8 are a path; a sibling stands before most of them
PATH = [0, 2, 3, 6, 8]
WINDOWS = {
    "architectures": ["MinistralForCausalLM"],
    "model_type": "ministral",
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention"],
}


def open_backend(bundle: Path, threads: int = 2) -> CpuBackend:
    manifest = load_manifest(bundle)
    layout = cache_shape(manifest, max_step_tokens=64).layout(4 << 20, manifest.spec.max_context)
    return CpuBackend(bundle / manifest.graph, manifest, layout, threads=threads, max_rows=64)


@pytest.fixture(scope="module", params=["f32", "f16", "int8", "fp8", "windows"])
def bundle(
    request: pytest.FixtureRequest, make_llama: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder, checkpoint = tmp_path_factory.mktemp("trees") / request.param, make_llama()
    if request.param == "windows":
        config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
        (checkpoint / "config.json").write_text(json.dumps(config | WINDOWS), encoding="utf-8")
    cache_type = "f16" if request.param == "windows" else request.param
    export(checkpoint, folder, uncertified(weights="int4", cache_type=cache_type, block_size=BLOCK_SIZE))
    return folder


@pytest.fixture
def backend(bundle: Path) -> Iterator[CpuBackend]:
    opened = open_backend(bundle)
    yield opened
    opened.close()


def path_to(row: int) -> list[int]:
    return [*path_to(PARENTS[row]), row] if row >= 0 else []


class Decoder:
    """One sequence in blocks of its own; the same in every group of layers."""

    def __init__(self, backend: CpuBackend, first_block: int) -> None:
        self.backend = backend
        self.blocks = np.arange(first_block, first_block + 12, dtype=np.int32)[None]

    def run(self, tokens: Sequence[int], past: int, tree: bool = False) -> NDArray[np.float32]:
        """The logits of all tokens; with `tree` they are those of PARENTS."""
        count, groups = len(tokens), len(self.backend.layout.groups)
        batch: dict[str, Any] = {"position_ids": np.arange(past, past + count)}
        if tree:
            paths = [path_to(row) for row in range(count)]
            batch["position_ids"] = np.array([past + len(path) - 1 for path in paths])
            bits = [sum(1 << row for row in path[:-1]) for path in paths]
            batch["ancestor_mask"] = np.array(bits, np.int32)[:, None]
        step = StepBatch(
            input_ids=np.array(tokens),
            cumulative_sequence_length=np.array([0, count], np.int32),
            past_seqlens=np.array([past], np.int32),
            block_tables=(self.blocks,) * groups,
            logits_indices=np.arange(count),
            **batch,
        )
        return self.backend.run(step).copy()

    def accept(self, past: int, path: Sequence[int]) -> None:
        for group in range(len(self.backend.layout.groups)):
            moves = [(past + row, past + to) for to, row in enumerate(path)]
            self.backend.copy_slots(group, [(self._slot(a), self._slot(b)) for a, b in moves])

    def _slot(self, position: int) -> int:
        return int(self.blocks[0, position // BLOCK_SIZE]) * BLOCK_SIZE + position % BLOCK_SIZE


@pytest.mark.parametrize("past", [1, 7, 8, 29, 64])
def test_an_accepted_path_goes_on_as_plain_decoding(backend: CpuBackend, past: int) -> None:
    assert backend.supports_trees
    tokens = np.random.default_rng(past).integers(2, 320, past + len(PARENTS) + 2).tolist()
    prompt, drafted, following = tokens[:past], tokens[past:-2], tokens[-2:]
    plain, other = Decoder(backend, 1), Decoder(backend, 20)
    assert (plain.run(prompt, 0) == other.run(prompt, 0)).all()
    verified = other.run(drafted, past, tree=True)
    for row in range(len(PARENTS)):
        path = path_to(row)
        chain = plain.run([drafted[i] for i in path], past)
        assert (verified[path] == chain).all()
    for position, row in enumerate(PATH, past):
        assert (plain.run([drafted[row]], position) == verified[row]).all()
    other.accept(past, PATH)
    for position, token in enumerate(following, past + len(PATH)):
        assert (other.run([token], position) == plain.run([token], position)).all()


def test_slots_are_copied_one_after_the_other_in_their_group_alone(backend: CpuBackend) -> None:
    rng = np.random.default_rng(0)
    arrays = backend._cache.arrays
    for array in arrays:
        array.memory[:4] = rng.random((4, *array.memory.shape[1:])) * 100
    before = [array.memory[:4].copy() for array in arrays]
    group = len(backend.layout.groups) - 1
    backend.copy_slots(group, [(3, 8), (8, 17), (0, 0)])
    for array, expected in zip(arrays, before, strict=True):
        if array.group == group:
            expected[1, 0] = expected[2, 1] = expected[0, 3]
        assert (array.memory[:4] == expected).all()


def test_a_wrong_tree_is_named_and_plain_steps_go_on(backend: CpuBackend) -> None:
    sequence = Decoder(backend, 0)
    expected = sequence.run([5, 6, 7], 0)
    mask = np.array([[0], [4], [0]], np.int32)
    offsets = np.array([0, 3], np.int32), np.array([0], np.int32)
    tables = (sequence.blocks,) * len(backend.layout.groups)
    step = StepBatch(np.array([5, 6, 7]), np.arange(3), *offsets, tables, np.arange(3), mask)
    with pytest.raises(BackendError, match="ancestor_mask says that row 1 of sequence 0 descends from row 2"):
        backend.run(step)
    assert (sequence.run([5, 6, 7], 0) == expected).all()


def test_a_bundle_from_before_trees_opens_and_refuses_them(bundle: Path, tmp_path: Path) -> None:
    manifest = load_manifest(bundle)
    old = Path(shutil.copytree(bundle, tmp_path / "old"))
    model = onnx.load(old / manifest.graph, load_external_data=False)
    model.graph.input.remove(next(value for value in model.graph.input if value.name == "ancestor_mask"))
    for node in model.graph.node:
        if node.op_type == "PagedAttention":
            assert node.input.pop() == "ancestor_mask"
    onnx.save(model, old / manifest.graph)
    before, now = open_backend(old), open_backend(bundle)
    assert not before.supports_trees
    tokens = list(range(2, 2 + len(PARENTS)))
    expected = Decoder(now, 0).run(tokens, 0)
    assert (Decoder(before, 0).run(tokens, 0) == expected).all()
    with pytest.raises(BackendError, match=r"no such input\. Export the bundle again"):
        Decoder(before, 0).run(tokens, 0, tree=True)
    assert (Decoder(before, 0).run(tokens, 0) == expected).all()
    before.close()
    now.close()
