"""pagelet beside other engines on this machine: one model, the same prompts, the same threads, in turns.

Each engine runs in a process of its own that stays open; in every round each does the same thing, one at a
time. Peers that are not installed in the Python that --python names are left out, with a line that says so.
"""

import argparse
import json
import os
import sys
from dataclasses import asdict, fields
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from pagelet.models.errors import InputError, PageletError
from pagelet.models.manifest import Manifest, load_manifest
from pagelet.tools.peers.entrants import PEERS, Entrant
from pagelet.tools.peers.figures import figures
from pagelet.tools.peers.measure import Record, Rounds, measure
from pagelet.tools.peers.prepare import Prepared, Sources, prepare
from pagelet.tools.peers.report import document, markdown, plot
from pagelet.tools.peers.scenarios import Scenario, Sizes, scenarios

_ENGINES = tuple(dict.fromkeys(peer.engine for peer in PEERS))

_IDLE_LOAD = 0.5  # threads that wait for each other at barriers lose far more than a busy program's share


def main(arguments: list[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    try:
        run(args)
    except PageletError as error:
        print(f"bench_peers: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m pagelet.tools.bench_peers", description=__doc__)
    parser.add_argument("--bundle", type=Path, action="append", required=True, help="ours; may be repeated")
    parser.add_argument("--gguf", type=Path, help="the same model, which the peers' files are made from")
    parser.add_argument(
        "--checkpoint", type=Path, help="the same as a Hugging Face folder; default: from --gguf"
    )
    parser.add_argument("--work", type=Path, required=True, help="where the peers' models and logs are kept")
    parser.add_argument(
        "--python", type=Path, default=Path(sys.executable), help="interpreter with the peers"
    )
    parser.add_argument(
        "--convert-python", type=Path, help="interpreter with optimum-intel; default: --python"
    )
    parser.add_argument("--engines", default=",".join(_ENGINES), help="default: %(default)s")
    parser.add_argument("--scenarios", help="only these of plain,rows-1,rows-4,rows-8,batch-8,batch-16,long")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--repeat", type=int, default=5, metavar="N", help="timed rounds; default: %(default)s"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=60.0,
        metavar="N",
        help="begin nothing new after; default: %(default)g",
    )
    for field in fields(Sizes):
        kind = int if isinstance(field.default, int) else _counts
        parser.add_argument(
            "--" + field.name.replace("_", "-"),
            type=kind,
            default=field.default,
            metavar="N",
            help="default: %(default)s",
        )
    parser.add_argument("--prepare-only", action="store_true", help="make the peers' models and stop")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every run and figure")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a picture (needs the extra: plot)")
    return parser


def _counts(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part)


def run(args: argparse.Namespace) -> None:
    sizes = Sizes(**{field.name: getattr(args, field.name) for field in fields(Sizes)})
    chosen = _chosen(scenarios(sizes), args.scenarios)
    for name, most in (("threads", 1024), ("repeat", 1000)):
        if not 1 <= getattr(args, name) <= most:
            raise InputError(f"--{name} is {getattr(args, name)}; expected 1 to {most}.")
    if args.plot and find_spec("matplotlib") is None:
        raise InputError("--plot needs matplotlib: pip install 'pagelet[plot]'.")
    load = load_average()  # before anything here adds to it
    manifests = [load_manifest(bundle) for bundle in args.bundle]
    args.work.mkdir(parents=True, exist_ok=True)
    prepared = _prepare(args)
    if args.prepare_only:
        print("\n".join([*(str(entrant.model) for entrant in prepared.entrants), *prepared.left_out]))
        return
    tokens = prompt_tokens(args.bundle[0], manifests[0])
    rounds = Rounds(chosen, args.repeat, args.threads, tokens, args.work, limit_s=60 * args.minutes)
    records = [Record(entrant) for entrant in (*_ours(args.bundle), *prepared.entrants)]
    try:
        measure(records, rounds, _show)
    except KeyboardInterrupt:
        _show("interrupted: the table has what was measured so far")
    columns = figures(chosen)
    print(markdown(columns, records, prepared.left_out))
    if load > _IDLE_LOAD:
        print(f"Not comparable: other programs were busy at the start (load average {load:.1f}).")
    if args.json:
        settings = {
            "threads": args.threads,
            "repeat": args.repeat,
            "load_average": load,
            "sizes": asdict(sizes),
        }
        whole = document(columns, records, prepared.left_out, settings)
        args.json.write_text(json.dumps(whole, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    if args.plot:
        plot(columns, records, args.plot)


def load_average() -> float:
    """Processes that ran or waited for a core in the last minute; 0 where the system does not tell."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


def _chosen(known: list[Scenario], keys: str | None) -> list[Scenario]:
    wanted = keys.split(",") if keys else [scenario.key for scenario in known]
    if unknown := set(wanted) - {scenario.key for scenario in known}:
        names = ", ".join(scenario.key for scenario in known)
        raise InputError(f"--scenarios has {', '.join(sorted(unknown))}; known: {names}.")
    return [scenario for scenario in known if scenario.key in wanted]


def _prepare(args: argparse.Namespace) -> Prepared:
    engines = args.engines.split(",") if args.engines else []
    if unknown := set(engines) - set(_ENGINES):
        raise InputError(f"--engines has {', '.join(sorted(unknown))}; known: {', '.join(_ENGINES)}.")
    if not engines:
        return Prepared()
    sources = Sources(args.gguf, args.checkpoint, args.work, args.python, args.convert_python or args.python)
    return prepare(sources, engines, _show)


def _ours(bundles: list[Path]) -> list[Entrant]:
    version = f"pagelet {metadata.version('pagelet')}"
    return [
        Entrant(f"pagelet {bundle.name}", "pagelet", bundle, Path(sys.executable), version)
        for bundle in bundles
    ]


def prompt_tokens(bundle: Path, manifest: Manifest) -> list[int]:
    """The ids that may stand in a random prompt: all but the tokenizer's added ones, such as end tokens."""
    added = json.loads((bundle / "tokenizer.json").read_text(encoding="utf-8")).get("added_tokens", [])
    special = {token["id"] for token in added}
    return [token for token in range(manifest.spec.vocab_size) if token not in special]


def _show(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
