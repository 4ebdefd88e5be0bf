"""Registers, spills and shared memory of the attention kernels, compiled for every GPU: no GPU is needed.

`python -m pagelet.tools.kernel_table [--json] [--sm 89,120] [--head-dim 128] [--every] [--jobs N]` ends with
1 if a decode kernel spills registers: a step of generation reads the whole cache through it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

from pagelet.models.targets import KERNEL_SMS
from pagelet.plugins.kernels.records import KernelError, KernelTable
from pagelet.plugins.kernels.variant import ACTIVATIONS, CACHES, AttentionVariant
from pagelet.tools import progress

# By head size: the heads of a model that has it (SmolLM2, Phi-2, Phi-3 mini, Llama 3, Gemma 3 4B).
_HEADS = {64: (9, 3), 80: (32, 32), 96: (32, 32), 128: (32, 8), 256: (8, 4)}
_COMMON = 128  # the head size that is compiled for every cache and activation by default


@dataclass(frozen=True)
class Row:
    """A kernel on a GPU. Spills and shared memory are bytes, of a thread and of a program."""

    head_dim: int
    activation: str
    cache: str
    role: str
    sm: int
    registers: int
    spills: int
    shared: int


def variants(head_dims: Iterable[int], every: bool) -> list[AttentionVariant]:
    """With f16 everywhere, and every cache and activation for one head size, or for all."""
    found = []
    for head_dim, activation, cache in product(head_dims, ACTIVATIONS, CACHES):
        if every or head_dim == _COMMON or (activation, cache) == ("f16", "f16"):
            heads, kv_heads = _HEADS[head_dim]
            plain = AttentionVariant(heads, kv_heads, head_dim, 32, rotary_dim=head_dim // 2)
            found.append(replace(plain, activation=activation, cache=cache))
    return found


def measure(variant: AttentionVariant, sms: Sequence[int]) -> list[Row]:
    """Compiles a variant.

    Raises:
        KernelCompileError: a kernel does not compile, or a tool is missing.
    """
    from pagelet.plugins.kernels.compile import compile_variants

    with tempfile.TemporaryDirectory(prefix="pagelet-kernels-") as folder:
        compile_variants([variant], sms, Path(folder))
        records = KernelTable.read(Path(folder)).kernels
    rows = []
    for spec in variant.kernels():
        for sm, cubin in records[spec.key].cubins.items():
            size = (cubin.registers, cubin.spills, cubin.shared)
            rows.append(Row(variant.head_dim, variant.activation, variant.cache, spec.role, sm, *size))
    return rows


def measure_all(chosen: Sequence[AttentionVariant], sms: Sequence[int], jobs: int) -> list[Row]:
    """All variants, in their order, in so many processes.

    Raises:
        KernelCompileError: as `measure`.
    """
    rows = []
    spawn = multiprocessing.get_context("spawn")  # Triton's compiler has threads, which a fork would lose
    with progress.bar("kernels", "variant") as show, ProcessPoolExecutor(jobs, spawn) as pool:
        for done, measured in enumerate(pool.map(measure, chosen, [sms] * len(chosen)), 1):
            rows += measured
            show(done, len(chosen), "")
    return rows


def table(rows: Sequence[Row]) -> str:
    """A line per kernel; for each GPU registers, spilled bytes where there are any, KiB of shared memory."""
    sms = sorted({row.sm for row in rows})
    lines: dict[tuple[int, str, str, str], dict[int, str]] = {}
    for row in rows:
        spills = f"!{row.spills}" if row.spills else ""
        cells = lines.setdefault((row.head_dim, row.activation, row.cache, row.role), {})
        cells[row.sm] = f"{row.registers}{spills} {row.shared / 1024:.0f}K"
    head = f"{'head':>4} {'act.':4} {'cache':5} {'kernel':12}" + "".join(f"{f'SM {sm}':>13}" for sm in sms)
    body = [
        f"{head_dim:>4} {activation:4} {cache:5} {role:12}" + "".join(f"{cells[sm]:>13}" for sm in sms)
        for (head_dim, activation, cache, role), cells in lines.items()
    ]
    return "\n".join([head, *body, "registers of a thread !bytes that it spills, shared memory of a program"])


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        rows = measure_all(variants(args.head_dim, args.every), args.sm, args.jobs)
    except KernelError as error:
        print(f"kernel_table: {error}", file=sys.stderr)
        return 1
    print(json.dumps([asdict(row) for row in rows], indent=1) if args.json else table(rows))
    spilling = [row for row in rows if row.role.startswith("decode") and row.spills]
    for row in spilling:
        print(
            f"kernel_table: {row.role} spills {row.spills} bytes: head {row.head_dim}, {row.activation}, "
            f"cache {row.cache}, SM {row.sm}",
            file=sys.stderr,
        )
    return 1 if spilling else 0


def _numbers(known: Sequence[int]) -> Callable[[str], tuple[int, ...]]:
    """Reads a list such as ``89,120`` of known numbers."""

    def numbers(text: str) -> tuple[int, ...]:
        found = tuple(int(part) for part in text.split(","))
        if unknown := set(found) - set(known):
            raise argparse.ArgumentTypeError(f"{sorted(unknown)} is unknown; known: {known}")
        return found

    return numbers


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError("expected at least 1")
    return number


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "pagelet.tools.kernel_table", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--sm", type=_numbers(KERNEL_SMS), default=KERNEL_SMS, help="of which GPUs")
    parser.add_argument(
        "--head-dim", type=_numbers(tuple(_HEADS)), default=tuple(_HEADS), help="which head sizes"
    )
    parser.add_argument("--every", action="store_true", help="every cache and activation for every head size")
    parser.add_argument(
        "--jobs", type=_positive, default=os.cpu_count(), help="processes that compile side by side"
    )
    parser.add_argument("--json", action="store_true", help="one JSON document instead of a table")
    return parser


if __name__ == "__main__":
    sys.exit(main())
