"""`pagelet bench`: how fast a bundle is on this machine."""

import argparse
import json
import sys
from typing import Any

from pagelet.models.errors import InputError
from pagelet.tools.bench import BenchOptions, BenchResult, bench
from pagelet.tools.cli import common
from pagelet.tools.roofline import Limits, Phase, Roofline


def add_parsers(commands: Any) -> None:
    parser = commands.add_parser("bench", help="how fast a bundle is here", description=__doc__)
    common.add_engine_options(parser)
    parser.add_argument("--prompt-tokens", type=int, default=512, metavar="N", help="default: %(default)s")
    parser.add_argument("--new-tokens", type=int, default=128, metavar="N", help="default: %(default)s")
    parser.add_argument("--sequences", type=int, default=1, metavar="N", help="requests at once; default: 1")
    parser.add_argument("--repeat", type=int, default=5, metavar="N", help="timed runs; default: %(default)s")
    parser.add_argument("--no-roofline", action="store_true", help="do not measure the machine's limits")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    for name in ("prompt_tokens", "new_tokens", "sequences", "repeat"):
        if getattr(args, name) < 1:
            raise InputError(f"--{name.replace('_', '-')} is {getattr(args, name)}; expected at least 1.")
    options = BenchOptions(
        args.prompt_tokens,
        args.new_tokens,
        args.sequences,
        args.repeat,
        args.threads,
        args.kv_memory,
        roofline=not args.no_roofline,
    )
    result = bench(args.bundle, options, _show_run)
    print(json.dumps(result.to_json(), indent=1) if args.json else _table(result))


def _show_run(done: int, total: int, name: str) -> None:
    if sys.stderr.isatty():
        print(
            f"\r{name} ({done + 1}/{total}) ",
            end="" if done + 1 < total else "\n",
            file=sys.stderr,
            flush=True,
        )


def _table(result: BenchResult) -> str:
    options, runs = result.options, result.runs

    def spread(name: str) -> str:
        values = [getattr(run, name) for run in runs]
        return f"{getattr(result, name):.1f} [{min(values):.1f} to {max(values):.1f}]"

    rows = [
        (
            "measured",
            f"{options.sequences} × ({options.prompt_tokens} prompt + {options.new_tokens} new tokens), "
            f"median of {options.repeat}",
        ),
        ("prefill", spread("prefill_tokens_per_second") + " tokens/s"),
        ("decode", spread("decode_tokens_per_second") + " tokens/s"),
        ("new tokens, all in", spread("new_tokens_per_second") + " tokens/s"),
        ("first token", f"{result.time_to_first_token_s:.3f} s"),
        ("load", f"{result.load_s:.3f} s"),
        ("peak memory", f"{result.peak_rss_bytes / 1e6:.0f} MB"),
        ("prefill reads", _reads(result.prefill)),
    ]
    if result.decode:
        rows.append(("decode step reads", _reads(result.decode)))
    return common.table(rows + _roofline(result))


def _reads(phase: Phase) -> str:
    """Weights, head and cache: what was read in which time."""
    return (
        f"{common.size(phase.work.read_bytes)} in {phase.seconds * 1e3:.1f} ms: "
        f"{phase.read_bytes_per_second / 1e9:.1f} GB/s"
    )


def _roofline(result: BenchResult) -> list[tuple[str, str]]:
    machine = result.roofline
    if machine is None:
        unasked = "not asked for" if not result.options.roofline else "not measured: needs pagelet[export]"
        return [("limits", unasked)]
    rows = [("limits here", _limits_of(machine))]
    for name, phase in (("prefill", result.prefill), ("decode", result.decode)):
        if phase and phase.limits:
            rows.append((f"{name} reaches", _reached(phase.limits)))
    return rows


def _limits_of(machine: Roofline) -> str:
    return (
        f"{machine.threads} threads: memory {machine.read_bytes_per_second / 1e9:.1f} GB/s; multiply-adds "
        f"{machine.int8_macs_per_second / 1e9:.0f} G/s in int8 (ONNX Runtime's MatMulInteger), "
        f"{machine.float32_macs_per_second / 1e9:.0f} G/s in float32 (its MatMul)"
    )


def _reached(limits: Limits) -> str:
    return (
        f"{limits.memory_share:.0%} of the memory limit, {limits.arithmetic_share:.0%} of the arithmetic "
        f"limit; the nearer one: {limits.next}"
    )
