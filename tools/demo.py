"""The main job on a real model, start to end: download, export, answer, figures. `make demo` runs it."""

import argparse
import sys
from pathlib import Path

from pagelet.tools.cli.guard import guarded

DEFAULT_PROMPT = "Why is the sky blue?"
DEFAULT_BUNDLE = Path("bundles/smollm2-135m-int4")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompt", default="")
    parser.add_argument("--bundle", type=Path, default=DEFAULT_BUNDLE)
    args = parser.parse_args()
    return guarded("demo", lambda: _demo(args.bundle, args.prompt.strip() or DEFAULT_PROMPT))


def _demo(bundle: Path, prompt: str) -> None:
    from pagelet.runtime import Engine, SamplingParams
    from pagelet.tools.cli import generate

    if not _is_whole(bundle):
        _export(bundle)
    with Engine.open(bundle) as engine:
        print(f"\n> {prompt}\n", flush=True)
        params = SamplingParams(max_tokens=400, temperature=0)
        completion = generate.show(engine, generate.build_prompt(engine, prompt), params)
        stats = engine.stats()
        used, total = stats.peak_blocks_used, stats.blocks_total
        size = sum(path.stat().st_size for path in bundle.iterdir())
        print(f"\n{generate.speed(completion)}")
        print(
            f"bundle {size / 1e6:.1f} MB; KV cache: {used} of {total} blocks of {stats.block_size} tokens "
            f"used, {stats.kv_bytes * used / total / 1e6:.1f} of {stats.kv_bytes / 1e6:.0f} MB reserved"
        )


def _is_whole(bundle: Path) -> bool:
    """Whether an earlier run left a bundle that can be opened."""
    from pagelet.models.errors import BundleError
    from pagelet.models.manifest import MANIFEST_NAME, check_files, load_manifest

    if not (bundle / MANIFEST_NAME).is_file():
        return False
    try:
        check_files(bundle, load_manifest(bundle))
    except BundleError as error:
        print(f"{error} Exporting it again.", file=sys.stderr)
        return False
    return True


def _export(bundle: Path) -> None:
    from pagelet.exporter import ExportOptions, export
    from pagelet.tools.download import SMOLLM2, fetch
    from pagelet.tools.progress import bar

    checkpoint = fetch(SMOLLM2)
    print(f"exporting {checkpoint.name} to {bundle} …", flush=True)
    with bar("export", "step") as on_progress:
        options = ExportOptions(force=True, certificate_seconds=10)
        export(checkpoint, bundle, options, on_progress=on_progress)


if __name__ == "__main__":
    sys.exit(main())
