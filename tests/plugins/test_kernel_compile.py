"""Kernels compiled ahead of time, without a GPU: that the files are for the GPUs that they say."""

from __future__ import annotations

import hashlib
import os
import struct
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

pytest.importorskip("triton")

from pagelet.models.targets import KERNEL_SMS
from pagelet.plugins.kernels import assembler as assemblers
from pagelet.plugins.kernels.assembler import Assembler, KernelCompileError, assembler_for
from pagelet.plugins.kernels.compile import SMS, compile_variants
from pagelet.plugins.kernels.records import TABLE, KernelTable
from pagelet.plugins.kernels.variant import AttentionVariant, KernelSpec

VARIANT = AttentionVariant(num_heads=4, kv_num_heads=2, head_dim=32, block_size=16, rotary_dim=32)
CUDA_12_ELF = 51  # the byte of a cubin's ELF header that names the ABI; CUDA 13 writes 65


@dataclass(frozen=True)
class Some:
    """As a variant of which only some kernels are compiled: those that take long are left out."""

    specs: tuple[KernelSpec, ...]

    def kernels(self) -> tuple[KernelSpec, ...]:
        return self.specs


def some(*roles: str) -> AttentionVariant:
    return Some(tuple(VARIANT.kernel(role) for role in roles))  # type: ignore[return-value]


def header(cubin: bytes) -> tuple[int, int]:
    """The ABI and the compute capability of a cubin's ELF header."""
    abi, flags = cubin[7], struct.unpack_from("<I", cubin, 48)[0]
    return abi, (flags if abi == CUDA_12_ELF else flags >> 8) & 0xFF


def triton_folder() -> Path:
    import triton

    return Path(triton.__file__).parent


@pytest.fixture(scope="module")
def every_gpu(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kernels")
    compile_variants([some("prepare", "merge"), some("merge")], KERNEL_SMS, folder)
    return folder


def test_gpus_are_those_of_the_targets() -> None:
    assert SMS == KERNEL_SMS


def test_each_cubin_is_for_its_gpu(every_gpu: Path) -> None:
    table = KernelTable.read(every_gpu)
    assert set(table.kernels) == {VARIANT.kernel(role).key for role in ("prepare", "merge")}
    for record in table.kernels.values():
        assert tuple(record.cubins) == SMS
        for sm, cubin in record.cubins.items():
            content = (every_gpu / record.file(sm)).read_bytes()
            assert header(content)[1] == sm
            assert (len(content), hashlib.sha256(content).hexdigest()) == (cubin.bytes, cubin.sha256)
            assert 8 <= cubin.registers <= 255


def test_jetpack_6_gets_cubins_of_cuda_12(every_gpu: Path) -> None:
    """Its driver has CUDA 12.6, and loads no ELF of CUDA 13."""
    table = KernelTable.read(every_gpu)
    assert "ptxas V12." in table.toolchains[87]
    for record in table.kernels.values():
        assert header((every_gpu / record.file(87)).read_bytes()) == (CUDA_12_ELF, 87)


def test_no_path_of_this_machine_is_in_a_cubin(every_gpu: Path) -> None:
    source = str(Path(__file__).parents[2]).encode()
    assert not any(source in path.read_bytes() for path in every_gpu.rglob("*.cubin"))


def test_a_whole_variant_compiles(tmp_path: Path) -> None:
    progress: list[tuple[int, int]] = []
    records = compile_variants(
        [VARIANT, replace(VARIANT, softcap=0.0)], [89], tmp_path, on_progress=lambda *at: progress.append(at)
    )
    assert {record.key for record in records} == {spec.key for spec in VARIANT.kernels()}
    assert progress == [(done, len(records)) for done in range(1, len(records) + 1)]
    for record in records:
        spec = VARIANT.kernel(record.role)
        assert (record.entry, record.warps, record.arguments) == (spec.function, spec.warps, spec.arguments)
        assert record.entry.encode() in (tmp_path / record.file(89)).read_bytes()
        assert record.cubins[89].spills == 0 or not record.role.startswith("decode")


def test_unknown_gpu_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KernelCompileError, match=r"no kernels are compiled for SM 75, 88, only for 80, 86"):
        compile_variants([VARIANT], [89, 88, 75], tmp_path)
    with pytest.raises(KernelCompileError, match="name at least one"):
        compile_variants([VARIANT], [], tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_broken_run_leaves_no_table(tmp_path: Path) -> None:
    compile_variants([some("merge")], [89], tmp_path)

    def interrupt(done: int, of: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compile_variants([some("prepare", "merge")], [89], tmp_path, on_progress=interrupt)
    assert not (tmp_path / TABLE).exists()


def test_a_specification_that_does_not_fit_its_function_is_refused(tmp_path: Path) -> None:
    spec = VARIANT.kernel("merge")
    swapped = replace(spec, arguments=(spec.arguments[1], spec.arguments[0], *spec.arguments[2:]))
    with pytest.raises(
        KernelCompileError, match=r"kernel merge_\w+ does not compile for SM 89: merge has the param"
    ):
        compile_variants([Some((swapped,))], [89], tmp_path)  # type: ignore[list-item]


def test_more_shared_memory_than_a_gpu_has_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules["pagelet.plugins.kernels.compile"].__dict__["_SHARED"], 89, 0)
    with pytest.raises(KernelCompileError, match=r"needs \d+ bytes of shared memory, there are 0 KiB"):
        compile_variants([some("merge")], [89], tmp_path)


def test_nothing_is_written_into_the_home_folder(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from pagelet.plugins.kernels.compile import compile_variants;"
        "from pagelet.plugins.kernels.variant import AttentionVariant as V;"
        "V.kernels = lambda v: (v.kernel('merge'),);"
        "compile_variants([V(4, 2, 32, 16)], [89], Path(sys.argv[1]))"
    )
    home, folder = tmp_path / "home", tmp_path / "kernels"
    home.mkdir()
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_")} | {"HOME": str(home)}
    subprocess.run([sys.executable, "-c", code, str(folder)], env=environment, check=True)
    assert (folder / TABLE).exists()
    assert not list(home.iterdir())


# Which ptxas


def bundled_is_cuda_13(monkeypatch: pytest.MonkeyPatch) -> None:
    at = Assembler.at

    def patched(path: Path) -> Assembler:
        return replace(at(path), cuda="13.4") if triton_folder() in path.parents else at(path)

    monkeypatch.setattr(Assembler, "at", staticmethod(patched))


def test_orin_is_served_by_the_package_where_triton_has_no_cuda_12(monkeypatch: pytest.MonkeyPatch) -> None:
    if assemblers._packaged() is None:
        pytest.skip("nvidia-cuda-nvcc-cu12 is not installed")
    bundled_is_cuda_13(monkeypatch)
    found = assembler_for(87, triton_folder())
    assert found.cuda.startswith("12.")
    assert triton_folder() not in found.path.parents
    assert assembler_for(89, triton_folder()).cuda == "13.4"


def test_orin_without_cuda_12_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    bundled_is_cuda_13(monkeypatch)
    monkeypatch.setattr(assemblers, "_PACKAGE", "pagelet-has-no-such-package")
    with pytest.raises(
        KernelCompileError, match=r"need a ptxas of CUDA 12.*`pip install pagelet-has-no-such"
    ):
        assembler_for(87, triton_folder())


def test_a_given_ptxas_is_taken_if_it_will_do() -> None:
    folder = triton_folder() / "backends" / "nvidia" / "bin"
    second = folder / "ptxas-blackwell"
    assert assembler_for(89, triton_folder(), second).path == second
    with pytest.raises(
        KernelCompileError, match=r"is of CUDA 13.*only from CUDA 12; `pip install nvidia-cuda-nvcc"
    ):
        assembler_for(87, triton_folder(), second)
    with pytest.raises(KernelCompileError, match="does not run"):
        assembler_for(89, triton_folder(), folder / "no-such-file")
    with pytest.raises(KernelCompileError, match="is no ptxas"):
        assembler_for(89, triton_folder(), Path("/bin/echo"))


def test_what_ptxas_says_reaches_the_user() -> None:
    assembler = assembler_for(89, triton_folder())
    with pytest.raises(KernelCompileError, match=r"ptxas V12\S+ ended with \d+ for sm_89: .*fatal"):
        assembler.assemble(".version 8.8\n.target sm_89\nnonsense\n", "sm_89")


def test_spills_are_counted() -> None:
    """A function that keeps 40 values alive where 24 registers are allowed."""
    loads = "\n".join(f"ld.volatile.global.u32 %r{i}, [%rd1+{4 * i}];" for i in range(40))
    stores = "\n".join(f"st.volatile.global.u32 [%rd1+{4 * i}], %r{39 - i};" for i in range(40))
    ptx = f"""
.version 8.8
.target sm_89
.address_size 64
.visible .entry f(.param .u64 p) .maxnreg 24 {{
.reg .u32 %r<40>; .reg .u64 %rd<2>;
ld.param.u64 %rd1, [p];
{loads}
{stores}
ret;
}}
"""
    assembled = assembler_for(89, triton_folder()).assemble(ptx, "sm_89")
    assert assembled.registers <= 24
    assert assembled.spills > 0


def test_what_was_compiled_before_is_not_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, spec = tmp_path / "cache", some("merge")
    (first,) = compile_variants([spec], [89], tmp_path / "a", cache=cache)
    with monkeypatch.context() as patch:
        patch.setattr(Assembler, "assemble", None)
        (second,) = compile_variants([spec], [89], tmp_path / "b", cache=cache)
    assert second == first
    file = first.file(89)
    assert (tmp_path / "b" / file).read_bytes() == (tmp_path / "a" / file).read_bytes()
    (entry,) = cache.iterdir()
    entry.write_bytes(entry.read_bytes()[:-1] + b"x")
    (third,) = compile_variants([spec], [89], tmp_path / "c", cache=cache)
    assert third == first
    assert (tmp_path / "c" / file).read_bytes() == (tmp_path / "a" / file).read_bytes()


def test_a_cache_that_cannot_be_written_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (record,) = compile_variants([some("merge")], [89], tmp_path / "a", cache=tmp_path / "file" / "cache")
    assert record.cubins[89].bytes > 0


def test_no_register_is_spilled_where_a_thread_may_have_more(tmp_path: Path) -> None:
    """ptxas alone spills here: it keeps to 168 registers."""
    variant = AttentionVariant(32, 8, 128, 32, rotary_dim=128, activation="bf16", cache="int8")
    spec = Some((variant.kernel("decode"),))
    (record,) = compile_variants([spec], [90], tmp_path)  # type: ignore[list-item]
    assert record.cubins[90].spills == 0
    assert record.cubins[90].registers > 168
