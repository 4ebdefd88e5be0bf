"""Compiles attention kernels ahead of time, without a GPU: Triton to PTX, ptxas to cubins, a table of them.

Triton's stages are run one by one instead of `triton.compile`: so the version of PTX and the ptxas can be
chosen per GPU without the process's environment, nothing goes into the user's cache, and what ptxas says of
registers and spills is of the very cubin that is shipped.
"""

from __future__ import annotations

import hashlib
import importlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import ptx_get_version, sm_arch_from_capability
from triton.compiler import ASTSource, make_backend

from pagelet.plugins.kernels.assembler import Assembled, Assembler, KernelCompileError, assembler_for
from pagelet.plugins.kernels.cubin_cache import CubinCache, cache_key
from pagelet.plugins.kernels.records import TABLE, CubinRecord, KernelRecord, KernelTable
from pagelet.plugins.kernels.variant import AttentionVariant, KernelSpec

# By compute capability, times ten: KiB of shared memory that a program may have at most (CUDA C++ Programming
# Guide, "Technical Specifications per Compute Capability").
_SHARED = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 110: 227, 120: 99, 121: 99}
SMS = tuple(_SHARED)
HIDDEN_POINTERS = 2  # Triton's scratch memory, global and for profiling: behind the arguments, null for us

_ALIGNED = [["tt.divisibility", 16]]  # of each pointer: what lets Triton load 16 bytes at once

Progress = Callable[[int, int], None]


def compile_variants(
    variants: Iterable[AttentionVariant],
    sms: Sequence[int],
    folder: Path,
    *,
    ptxas: Mapping[int, Path] | None = None,
    cache: Path | None = None,
    on_progress: Progress | None = None,
) -> list[KernelRecord]:
    """Compiles all kernels of some nodes for some GPUs, each kernel once.

    Args:
        sms: compute capabilities, times ten: 89 for 8.9.
        folder: gets `kernels.json` last, when all cubins are there, so a broken run leaves none.
        ptxas: by compute capability, taken instead of the one that would be.
        cache: a folder of cubins that were compiled before (`cubin_cache`); None: all are compiled.
        on_progress: called with the number of cubins that are done, and of all.

    Raises:
        KernelCompileError: an unknown compute capability, a missing ptxas, or a kernel that does not compile.
    """
    if unknown := sorted(set(sms) - set(SMS)):
        raise KernelCompileError(
            f"no kernels are compiled for SM {', '.join(map(str, unknown))}, only for "
            f"{', '.join(map(str, SMS))}"
        )
    if not sms:
        raise KernelCompileError("kernels are asked for no GPU: name at least one compute capability")
    assemblers = {
        sm: assembler_for(sm, Path(triton.__file__).parent, (ptxas or {}).get(sm)) for sm in sorted(set(sms))
    }
    specs = {spec.key: spec for variant in variants for spec in variant.kernels()}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / TABLE).unlink(missing_ok=True)
    records = []
    for spec in specs.values():
        records.append(_compile_kernel(spec, assemblers, folder, CubinCache(cache)))
        if on_progress is not None:
            on_progress(len(records) * len(assemblers), len(specs) * len(assemblers))
    toolchains = {sm: f"Triton {triton.__version__}, {ptxas.name}" for sm, ptxas in assemblers.items()}
    KernelTable(toolchains, {record.key: record for record in records}).write(folder)
    return records


def _compile_kernel(
    spec: KernelSpec, assemblers: Mapping[int, Assembler], folder: Path, cache: CubinCache
) -> KernelRecord:
    """Writes the kernel's cubins."""
    cubins: dict[int, CubinRecord] = {}
    record = KernelRecord(spec.key, spec.role, spec.function, spec.warps, spec.arguments, cubins)
    for sm, assembler in assemblers.items():
        key = cache_key(spec.key, sm, triton.__version__, assembler.name)
        known = cache.get(key)
        try:
            assembled, shared = known or _assembled(spec, sm, assembler)
        except Exception as error:  # Triton raises many kinds
            raise KernelCompileError(f"kernel {spec.key} does not compile for SM {sm}: {error}") from error
        if known is None:
            cache.put(key, assembled, shared)
        path = folder / record.file(sm)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(assembled.cubin)
        digest = hashlib.sha256(assembled.cubin).hexdigest()
        cubins[sm] = CubinRecord(len(assembled.cubin), digest, assembled.registers, assembled.spills, shared)
    return record


def _assembled(spec: KernelSpec, sm: int, assembler: Assembler) -> tuple[Assembled, int]:
    """The cubin, and the bytes of shared memory that a launch of it needs."""
    ptx, shared = _ptx(spec, sm, ptx_get_version(assembler.cuda))
    if shared > _SHARED[sm] << 10:
        raise KernelCompileError(f"it needs {shared} bytes of shared memory, there are {_SHARED[sm]} KiB")
    architecture = sm_arch_from_capability(sm)
    assembled = assembler.assemble(ptx, architecture)
    if assembled.spills:
        # ptxas leaves registers for a third program on a multiprocessor; without spills two are faster.
        free = assembler.assemble(_with_all_registers(ptx), architecture)
        assembled = min(assembled, free, key=lambda each: each.spills)
    return assembled, shared


def _with_all_registers(ptx: str) -> str:
    """Allowed as many registers as a thread may have."""
    return re.sub(r"(\.reqntid \d+)", r"\1\n.maxnreg 255", ptx, count=1)


def _ptx(spec: KernelSpec, sm: int, version: int) -> tuple[str, int]:
    """A kernel's PTX, and the bytes of shared memory that a launch of it needs.

    Args:
        version: of PTX, ten times: 88 for 8.8.
    """
    target = GPUTarget("cuda", sm, 32)
    backend = make_backend(target)
    source = _source(spec)
    # Multiplications and additions are fused, as a later Triton would no longer do by itself.
    options = backend.parse_options(
        {
            "num_warps": spec.warps,
            "num_stages": spec.stages,
            "ptx_version": version,
            "enable_fp_fusion": True,
        }
    )
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    stages: dict[str, Callable[[Any, dict[str, Any]], Any]] = {}
    backend.add_stages(stages, options, source.language)
    metadata: dict[str, Any] = {"target": target, **vars(options)}
    module = source.make_ir(
        target, options, backend.get_codegen_implementation(options), backend.get_module_map(), context
    )
    for name in ("ttir", "ttgir", "llir", "ptx"):
        module = stages[name](module, metadata)
    _check_entry(spec, module, metadata)
    return module, metadata["shared"]


def _source(spec: KernelSpec) -> ASTSource:
    function = getattr(importlib.import_module(spec.module), spec.function)
    if not isinstance(function, triton.JITFunction):
        raise KernelCompileError(
            "Triton was imported with TRITON_INTERPRET set, which compiles nothing: unset it"
        )
    names = [name for name, _ in spec.arguments]
    if function.arg_names != [*names, *spec.constants]:
        raise KernelCompileError(
            f"{spec.function} has the parameters {function.arg_names}, its specification "
            f"{[*names, *spec.constants]}"
        )
    signature = dict(spec.arguments) | dict.fromkeys(spec.constants, "constexpr")
    aligned = {(i,): _ALIGNED for i, (_, kind) in enumerate(spec.arguments) if kind.startswith("*")}
    return ASTSource(function, signature, constexprs=dict(spec.constants), attrs=aligned)


def _check_entry(spec: KernelSpec, ptx: str, metadata: Mapping[str, Any]) -> None:
    """Whether a launch as the table describes it is what the kernel takes."""
    found = re.search(r"\.visible \.entry (\w+)\(([^)]*)\)", ptx)
    parameters = found[2].count(".param") if found else 0
    expected = len(spec.arguments) + HIDDEN_POINTERS
    if found is None or found[1] != spec.function or parameters != expected:
        raise KernelCompileError(
            f"its PTX has {parameters} parameters, expected {expected} of {spec.function}"
        )
    if metadata["num_warps"] != spec.warps:
        raise KernelCompileError(f"Triton made it for {metadata['num_warps']} warps, expected {spec.warps}")
    if metadata["global_scratch_size"] or metadata["profile_scratch_size"]:
        raise KernelCompileError("it asks for scratch memory, which no launch gives it")
