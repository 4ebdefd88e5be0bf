"""The kernels that the checks launch, compiled ahead of time: on the GPU's machine, or before on any."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from pagelet.plugins.kernels.launch_plan import plan
from pagelet.plugins.kernels.records import KernelError, KernelRecord, KernelTable
from pagelet.plugins.kernels.variant import AttentionVariant, KernelSpec
from pagelet.tools.gpu import graph, timing
from pagelet.tools.gpu.cases import CASES
from pagelet.tools.gpu.steps import build

OnProgress = Callable[[int, int], None]


def needed() -> dict[str, KernelSpec]:
    """By key: of all cases and loads, what they launch, which is fewer than their nodes have."""
    steps = [(case.variant, build(case).shapes) for case in (*CASES, graph.CASE)]
    steps += [(load.variant, load.shapes) for load in timing.LOADS]
    launches = [launch for variant, shapes in steps for launch in plan(variant, shapes)]
    return {launch.kernel.key: launch.kernel for launch in launches}


def compile_needed(
    folder: Path,
    sm: int,
    jobs: int,
    *,
    specs: dict[str, KernelSpec] | None = None,
    on_progress: OnProgress = lambda done, of: None,
) -> list[str]:
    """Compiles all that is needed into a folder with a `kernels.json`; why some kernels do not compile.

    Raises:
        KernelError: nothing compiles: no triton, or a GPU that there are no kernels for.
    """
    specs = needed() if specs is None else specs
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"sm_{sm}").mkdir(exist_ok=True)
    records: dict[str, KernelRecord] = {}
    toolchains: dict[int, str] = {}
    problems: list[str] = []
    with (
        tempfile.TemporaryDirectory(prefix=".parts-", dir=folder) as parts,
        ProcessPoolExecutor(jobs) as pool,
    ):
        compiling = [pool.submit(_compile, spec, sm, Path(parts) / key) for key, spec in specs.items()]
        for done, each in enumerate(compiling, 1):
            try:
                part = each.result()
            except (KernelError, ImportError) as error:
                problems.append(str(error))
                continue
            table = KernelTable.read(part)
            for record in table.kernels.values():
                shutil.move(part / record.file(sm), folder / record.file(sm))
                records[record.key] = record
            toolchains |= table.toolchains
            on_progress(done, len(specs))
    if not records:
        raise KernelError(problems[0])
    KernelTable(toolchains, records).write(folder)
    return problems


@dataclass(frozen=True)
class _One:
    """What a compiler wants of a variant, for one of its kernels."""

    spec: KernelSpec

    def kernels(self) -> tuple[KernelSpec, ...]:
        return (self.spec,)


def _compile(spec: KernelSpec, sm: int, folder: Path) -> Path:
    from pagelet.plugins.kernels.compile import compile_variants

    compile_variants([cast(AttentionVariant, _One(spec))], [sm], folder)
    return folder
