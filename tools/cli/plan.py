"""`pagelet plan`: what fits into a device and how fast it can be at most, before anything is loaded."""

import argparse
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from pagelet.models.cache import CACHE_TYPES
from pagelet.models.config import spec_from_config
from pagelet.models.errors import CheckpointError, InputError
from pagelet.models.manifest import MANIFEST_NAME, load_manifest
from pagelet.models.spec import ModelSpec
from pagelet.models.targets import FIRST_FP8_SM, TARGETS
from pagelet.models.wrapped_config import text_config
from pagelet.runtime.config import parse_size
from pagelet.tools.cli import common
from pagelet.tools.devices import DEVICES, Device
from pagelet.tools.plan import WEIGHT_TYPES, Draft, Plan, plan


def add_parsers(commands: Any) -> None:
    parser = commands.add_parser("plan", help="what fits into a device", description=__doc__)
    parser.add_argument("source", type=Path, metavar="SRC|BUNDLE", help="a config.json suffices")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--memory", metavar="SIZE", help="bytes for weights and cache, such as 8GiB")
    where.add_argument("--device", choices=sorted(DEVICES), help="a known device")
    own = "default: a bundle's own; of a checkpoint "
    parser.add_argument("--weights", choices=WEIGHT_TYPES, help=own + "int4")
    parser.add_argument("--kv", choices=sorted(CACHE_TYPES), help="cache type; " + own + "f16")
    parser.add_argument(
        "--target", choices=tuple(TARGETS), help="what it is exported for; default: a bundle's own, else cpu"
    )
    parser.add_argument("--context", type=int, metavar="N", help="tokens of a sequence; default: the model's")
    parser.add_argument("--sequences", type=int, default=1, metavar="M", help="at once; default: 1")
    parser.add_argument(
        "--draft", type=Path, metavar="SRC|BUNDLE", help="a second model beside it, which guesses ahead"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    for name in ("context", "sequences"):
        value = getattr(args, name)
        if value is not None and not 1 <= value <= 1 << 24:
            raise InputError(f"--{name} is {value}; expected 1 to {1 << 24}.")
    device = DEVICES.get(args.device)
    spec = read_spec(args.source)
    draft = Draft(read_spec(args.draft), *_own_types(args.draft)) if args.draft else None
    if draft:
        _check_draft(draft.spec, spec, args.context)
    weights, cache_type = _own_types(args.source)
    target = args.target or _own_target(args.source)
    kinds = args.weights or weights, args.kv or cache_type
    _check_types(target, *kinds)
    if device and TARGETS[target].is_gpu:
        _check_gpu(device, target, kinds, args.source)
    made = plan(
        spec,
        device.usable if device else parse_size(args.memory, "--memory"),
        weights=args.weights or weights,
        cache_type=args.kv or cache_type,
        context=args.context,
        sequences=args.sequences,
        bandwidth=device.bandwidth if device else None,
        draft=draft,
        target=target,
    )
    print(
        json.dumps(made.to_json(), indent=1) if args.json else _table(made, device.title if device else None)
    )


def _check_draft(draft: ModelSpec, target: ModelSpec, context: int | None) -> None:
    """What can be seen without the tokenizers."""
    context = min(context or target.max_context, target.max_context)
    for what, found, limit, is_wrong in (
        (
            "tokens in its vocabulary",
            draft.vocab_size,
            target.vocab_size,
            draft.vocab_size > target.vocab_size,
        ),
        ("tokens of context", draft.max_context, context, draft.max_context < context),
    ):
        if is_wrong:
            raise InputError(f"the draft has {found} {what}, the target {limit}: they do not go together.")


def _own_types(source: Path) -> tuple[str, str]:
    """(weights, cache type): a bundle's, or what an export makes by default."""
    if not (source / MANIFEST_NAME).is_file():
        return "int4", "f16"
    manifest = load_manifest(source)
    return manifest.quantization.weights, manifest.cache_type


def _own_target(source: Path) -> str:
    return load_manifest(source).target if (source / MANIFEST_NAME).is_file() else "cpu"


def _check_types(target: str, weights: str, cache_type: str) -> None:
    row = TARGETS[target]
    for what, found, known in (("weights", weights, row.weights), ("cache", cache_type, row.caches)):
        if found.removesuffix("-symmetric") not in known:
            raise InputError(f"the target {target} has no {found} {what}; it serves {', '.join(known)}.")


def _check_gpu(device: Device, target: str, kinds: tuple[str, str], source: Path) -> None:
    """Whether the device runs what is planned for it."""
    row = TARGETS[target]
    sms: Collection[int] = row.sms
    if (source / MANIFEST_NAME).is_file() and (gpu := load_manifest(source).gpu):
        sms = gpu.sms
    if not device.sm or (sms and device.sm not in sms):
        served = f"it is for SM {', '.join(map(str, sms))}" if sms else "it is for NVIDIA GPUs"
        raise InputError(
            f"{device.title} (SM {device.sm or 'none'}) does not run this target {target}: {served}."
        )
    if "fp8" in kinds and row.has_kernels and device.sm < FIRST_FP8_SM:
        raise InputError(
            f"{device.title} has SM {device.sm}; fp8 weights and caches need SM {FIRST_FP8_SM} or newer."
        )


def read_spec(source: Path) -> ModelSpec:
    """The spec of a bundle, a checkpoint, or a folder (or file) with nothing but config.json."""
    if (source / MANIFEST_NAME).is_file():
        return load_manifest(source).spec
    config = source / "config.json" if source.is_dir() else source
    if config.suffix != ".json":
        from pagelet.exporter.checkpoint import open_checkpoint

        with open_checkpoint(source) as checkpoint:
            return checkpoint.spec
    try:
        data = json.loads(common.read_text(config))
    except ValueError as error:
        if isinstance(error, InputError):
            raise
        raise CheckpointError(f"{config} is not valid JSON: {error}.") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{config} holds no JSON object; expected a Hugging Face config.")
    return spec_from_config(text_config(data))


def _table(made: Plan, device: str | None) -> str:
    rows = [
        ("device", device or "as given"),
        ("memory for the model", _gib(made.memory)),
        *((f"weights {kind}", _gib(size)) for kind, size in made.weight_bytes.items()),
        *(
            (f"cache {kind}, per token", f"{size:,} bytes")
            for kind, size in made.cache_bytes_per_token.items()
        ),
        (
            "asked for",
            f"{made.weights} weights + {made.sequences} × {made.context:,} tokens of {made.cache_type} cache",
        ),
        *_draft_rows(made),
        ("needs", f"{_gib(made.needed)}: {'fits' if made.fits else 'does NOT fit'}"),
        ("at most", f"{made.max_tokens:,} tokens of cache, {made.max_sequences} × {made.context:,}"),
    ]
    if made.build_bytes:
        rows.append(
            ("building the engine", f"about {_gib(made.build_bytes)}, once, before the cache is there")
        )
    if made.decode_tokens_per_second is not None:
        rows.append(("decode, upper bound", f"{made.decode_tokens_per_second:,.0f} tokens/s in all"))
    return common.table(rows)


def _draft_rows(made: Plan) -> list[tuple[str, str]]:
    if not made.draft_weight_bytes:
        return []
    weights, cache = _gib(made.draft_weight_bytes), _gib(made.draft_cache_bytes)
    return [("draft", f"{weights} weights + {cache} cache for the same tokens")]


def _gib(size: int) -> str:
    return f"{size / 2**30:,.2f} GiB"
