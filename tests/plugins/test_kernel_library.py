"""KernelLibrary over a driver that records: what a table and a plan become in launches."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreted_kernels import finish, start

from pagelet.plugins.cuda_driver import CudaError
from pagelet.plugins.kernels.launch_plan import Offset, Shapes, Workspace, plan
from pagelet.plugins.kernels.library import KernelLibrary, KernelLibraryError
from pagelet.plugins.kernels.records import TABLE, CubinRecord, KernelRecord, KernelTable, KernelTableError
from pagelet.plugins.kernels.variant import AttentionVariant

VARIANT = AttentionVariant(num_heads=4, kv_num_heads=2, head_dim=32, block_size=16, cache="int8")
DECODE, TREE, PREFILL = Shapes(3, 3, 64), Shapes(8, 2, 64, 8, 1), Shapes(100, 2, 64)
WORKSPACE, STREAM = 1 << 20, 7
TENSORS = {
    name: (place + 1) << 12
    for place, name in enumerate(
        (
            "query",
            "key_cache",
            "value_cache",
            "key_scale_cache",
            "value_scale_cache",
            "cumulative_sequence_length",
            "past_seqlens",
            "block_table",
            "position_ids",
            "ancestor_mask",
            "output",
        )
    )
}


class Recorder:
    """Of a driver, what the library uses."""

    def __init__(self, compute_capability: int = 89) -> None:
        self.compute_capability, self.name = compute_capability, "a GPU that records"
        self.images: list[bytes] = []
        self.unloaded: list[int] = []
        self.shared: dict[int, int] = {}
        self.launches: list[tuple[Any, ...]] = []
        self.refuses = False

    def load_module(self, image: bytes) -> int:
        if self.refuses:
            raise CudaError("cuModuleLoadData failed.", 209, "CUDA_ERROR_NO_BINARY_FOR_GPU")
        self.images.append(image)
        return len(self.images)

    def unload_module(self, module: int) -> None:
        self.unloaded.append(module)
        if self.refuses:
            raise CudaError("cuModuleUnload failed.", 700, "CUDA_ERROR_ILLEGAL_ADDRESS")

    def function(self, module: int, entry: str) -> int:
        return 1000 * module

    def allow_shared(self, function: int, num_bytes: int) -> None:
        self.shared[function] = num_bytes

    def launch(self, *call: Any) -> None:
        self.launches.append(call)


def image_of(key: str) -> bytes:
    return f"cubin of {key}".encode()


def write_kernels(folder: Path, sms: Sequence[int] = (86, 89), large: str = "prefill") -> Path:
    """A folder of all kernels of the variant; those of the role `large` need 64 KiB of shared memory."""
    records = {}
    for spec in VARIANT.kernels():
        image, shared = image_of(spec.key), 65536 if spec.role == large else 1024
        cubin = CubinRecord(len(image), hashlib.sha256(image).hexdigest(), 96, 0, shared)
        record = KernelRecord(
            spec.key, spec.role, spec.function, spec.warps, spec.arguments, dict.fromkeys(sms, cubin)
        )
        for sm in sms:
            (folder / record.file(sm)).parent.mkdir(exist_ok=True)
            (folder / record.file(sm)).write_bytes(image)
        records[spec.key] = record
    KernelTable(dict.fromkeys(sms, "ptxas"), records).write(folder)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_kernels(tmp_path)


@pytest.mark.parametrize("shapes", [DECODE, TREE, PREFILL])
def test_launches_are_those_of_the_plan(folder: Path, shapes: Shapes) -> None:
    driver = Recorder()
    KernelLibrary(folder, driver).run(VARIANT, shapes, TENSORS, WORKSPACE, STREAM)  # type: ignore[arg-type]
    planned = plan(VARIANT, shapes)
    assert len(planned) == (2 if shapes is PREFILL else 3)
    for launch, (handle, grid, threads, shared, stream, arguments, types) in zip(
        planned, driver.launches, strict=True
    ):
        declared = launch.kernel.arguments
        assert driver.images[handle // 1000 - 1] == image_of(launch.kernel.key)
        assert (grid, threads, stream) == (launch.grid, 32 * launch.kernel.warps, STREAM)
        assert shared == (65536 if launch.kernel.role == "prefill" else 1024)
        # As declared, then Triton's two scratch pointers, of which our kernels have none.
        assert [*types[:-2]] == [kind for _, kind in declared]
        assert all(kind.startswith("*") for kind in types[-2:])
        assert [*arguments[-2:]] == [0, 0]
        for (name, kind), value, source in zip(declared, arguments, launch.arguments, strict=False):
            if isinstance(source, int):
                assert (kind, value) == ("i32", source), name
            elif isinstance(source, Workspace):
                assert value == WORKSPACE + source.offset, name
            elif isinstance(source, Offset):
                assert value == TENSORS[source.name] + source.bytes, name
            else:
                assert value == TENSORS.get(source, 0), name


def test_absent_tensors_are_null_pointers(folder: Path) -> None:
    driver = Recorder()
    KernelLibrary(folder, driver).run(VARIANT, DECODE, TENSORS, WORKSPACE, STREAM)  # type: ignore[arg-type]
    prepare = dict(
        zip([name for name, _ in VARIANT.kernel("prepare").arguments], driver.launches[0][5], strict=False)
    )
    assert [prepare[name] for name in ("cos_cache", "q_norm_weight", "k_norm_weight")] == [0, 0, 0]
    # Packed: keys and values lie behind the queries of the same row.
    assert prepare["key"] == TENSORS["query"] + 2 * 4 * 32
    assert prepare["value"] == prepare["key"] + 2 * 2 * 32


def test_modules_are_loaded_when_first_used_and_once(folder: Path) -> None:
    driver = Recorder()
    library = KernelLibrary(folder, driver)  # type: ignore[arg-type]
    assert not driver.images
    for step in range(3):
        moved = {name: pointer + 4096 * step for name, pointer in TENSORS.items()}
        library.run(VARIANT, DECODE, moved, WORKSPACE, STREAM)
        library.run(VARIANT, PREFILL, moved, WORKSPACE, STREAM)
    assert driver.images == [
        image_of(VARIANT.kernel(role).key) for role in ("prepare", "decode", "merge", "prefill")
    ]
    assert driver.shared == {4000: 65536}  # beyond 48 KiB
    library.load(VARIANT)
    assert len(driver.images) == len(VARIANT.kernels())
    library.close()
    assert driver.unloaded == [*range(1, len(driver.images) + 1)]


def test_moved_tensors_are_followed(folder: Path) -> None:
    driver = Recorder()
    library = KernelLibrary(folder, driver)  # type: ignore[arg-type]
    for pointers, workspace in (
        (TENSORS, WORKSPACE),
        (TENSORS | {"output": 1 << 30}, WORKSPACE),
        (TENSORS, 1 << 31),
    ):
        driver.launches.clear()
        library.run(VARIANT, DECODE, pointers, workspace, STREAM)
        merge = dict(
            zip([name for name, _ in VARIANT.kernel("merge").arguments], driver.launches[2][5], strict=False)
        )
        assert merge["output"] == pointers["output"]
        assert merge["partial_output"] >= workspace


def test_no_rows_are_no_launches(folder: Path) -> None:
    driver = Recorder()
    KernelLibrary(folder, driver).run(VARIANT, Shapes(0, 0, 4), TENSORS, WORKSPACE, STREAM)  # type: ignore[arg-type]
    assert not driver.launches


def test_misaligned_tensors_are_named(folder: Path) -> None:
    driver = Recorder()
    library = KernelLibrary(folder, driver)  # type: ignore[arg-type]
    with pytest.raises(KernelLibraryError, match="not aligned to 16 bytes: block_table, workspace"):
        library.run(VARIANT, DECODE, TENSORS | {"block_table": 4104}, WORKSPACE + 8, STREAM)
    assert not driver.launches


def test_a_driver_of_paper_computes_what_the_reference_does() -> None:
    finish(start(Path(__file__).with_name("interpreted_library.py")))


@pytest.mark.parametrize("lost", [False, True])
def test_nothing_runs_after_closing(folder: Path, lost: bool) -> None:
    """All modules are unloaded, also where a kernel's error took the context with it."""
    driver = Recorder()
    library = KernelLibrary(folder, driver)  # type: ignore[arg-type]
    library.run(VARIANT, DECODE, TENSORS, WORKSPACE, STREAM)
    driver.refuses = lost
    library.close()
    library.close()
    assert driver.unloaded == [1, 2, 3]
    with pytest.raises(KernelLibraryError, match="the kernels were unloaded"):
        library.run(VARIANT, DECODE, TENSORS, WORKSPACE, STREAM)


# What is refused


def test_another_gpu_is_refused(folder: Path) -> None:
    with pytest.raises(
        KernelLibraryError, match=r"are for SM 86, 89; a GPU .* has SM 120: export with --sm 120"
    ):
        KernelLibrary(folder, Recorder(120))  # type: ignore[arg-type]


def test_a_missing_kernel_is_named(folder: Path) -> None:
    other = AttentionVariant(num_heads=4, kv_num_heads=2, head_dim=64, block_size=16)
    library = KernelLibrary(folder, Recorder())  # type: ignore[arg-type]
    with pytest.raises(
        KernelLibraryError, match=r"the kernel prepare_\w+ for SM 89 is not in .*: export again"
    ):
        library.run(other, DECODE, TENSORS, WORKSPACE, STREAM)


@pytest.mark.parametrize("damage", ["shorter", "changed", "missing"])
def test_a_damaged_cubin_is_refused(folder: Path, damage: str) -> None:
    path = folder / "sm_89" / f"{VARIANT.kernel('merge').key}.cubin"
    content = path.read_bytes()
    path.unlink()
    if damage != "missing":
        path.write_bytes(content[:-1] if damage == "shorter" else content[:-1] + b"?")
    driver = Recorder()
    library = KernelLibrary(folder, driver)  # type: ignore[arg-type]
    with pytest.raises(KernelLibraryError, match="cannot be read" if damage == "missing" else "is damaged"):
        library.run(VARIANT, DECODE, TENSORS, WORKSPACE, STREAM)
    assert not driver.launches  # of the kernels before it neither


def test_what_the_driver_does_not_load_names_the_toolchain(folder: Path) -> None:
    driver = Recorder()
    library = KernelLibrary(folder, driver)  # type: ignore[arg-type]
    driver.refuses = True
    with pytest.raises(
        KernelLibraryError, match=r"SM 89, made by ptxas, does not load on a GPU that records: cuModule"
    ):
        library.load(VARIANT)


@pytest.mark.parametrize("content", [None, b"", b"{", b"[" * 100_000, b'{"version": 2}', b"[]", b"\xff"])
def test_a_table_that_is_none_is_refused(folder: Path, content: bytes | None) -> None:
    (folder / TABLE).unlink()
    if content is not None:
        (folder / TABLE).write_bytes(content)
    with pytest.raises(KernelTableError, match=r"kernels\.json"):
        KernelTable.read(folder)


def test_a_table_is_read_as_it_was_written(folder: Path) -> None:
    table = KernelTable.read(folder)
    assert {key: record.arguments for key, record in table.kernels.items()} == {
        spec.key: spec.arguments for spec in VARIANT.kernels()
    }
    again = folder / "again"
    again.mkdir()
    table.write(again)
    assert (again / TABLE).read_bytes() == (folder / TABLE).read_bytes()


def test_no_file_outside_of_the_folder_is_read(folder: Path) -> None:
    content = json.loads((folder / TABLE).read_text())
    next(iter(content["kernels"].values()))["sms"]["89"]["file"] = "../../etc/passwd"
    (folder / TABLE).write_text(json.dumps(content))
    with pytest.raises(
        KernelTableError, match=r"the file for SM 89 is '\.\./\.\./etc/passwd', expected 'sm_89/"
    ):
        KernelTable.read(folder)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The ways to everything inside a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, child in items for place in places(child, (*path, key)))]


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_kernels(tmp_path_factory.mktemp("hostile"))


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_a_hostile_table_is_read_or_refused(hostile: Path, data: st.DataObject) -> None:
    """Whatever stands in some place of it: no other exception, and what is read has the right types."""
    original = (hostile / TABLE).read_text()
    content = json.loads(original)
    *way, last = data.draw(st.sampled_from(places(content)[1:]))
    parent = content
    for key in way:
        parent = parent[key]
    values = [None, True, -1, 0, 1 << 40, 1.5, "", "../x", "i32", [], [[]], {}, {"89": {}}, "a" * 300]
    parent[last] = data.draw(st.sampled_from(values))
    (hostile / TABLE).write_text(json.dumps(content))
    try:
        table = KernelTable.read(hostile)
    except KernelTableError:
        return
    finally:
        (hostile / TABLE).write_text(original)
    for key, record in table.kernels.items():
        assert record.key == key
        assert all(type(cubin.bytes) is int and cubin.bytes >= 0 for cubin in record.cubins.values())
        assert all(len(argument) == 2 for argument in record.arguments)
