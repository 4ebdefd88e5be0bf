"""The main job on a real model, start to end: download, export, answer, figures. `make demo` runs it."""

import argparse
import sys
from pathlib import Path

from pagelet.exporter import export
from pagelet.models.errors import PageletError
from pagelet.models.manifest import MANIFEST_NAME
from pagelet.runtime import Engine, SamplingParams
from pagelet.tools.cli import generate
from pagelet.tools.download import SMOLLM2, fetch
from pagelet.tools.progress import bar

DEFAULT_PROMPT = "Why is the sky blue?"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompt", default="")
    parser.add_argument("--bundle", type=Path, default=Path("bundles/smollm2-135m-int4"))
    args = parser.parse_args()
    try:
        _demo(args.bundle, args.prompt.strip() or DEFAULT_PROMPT)
    except PageletError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("demo: stopped", file=sys.stderr)
        return 130
    return 0


def _demo(bundle: Path, prompt: str) -> None:
    if not (bundle / MANIFEST_NAME).is_file():
        checkpoint = fetch(SMOLLM2)
        print(f"exporting {checkpoint.name} to {bundle} …", flush=True)
        with bar("export", "tensor") as on_progress:
            export(checkpoint, bundle, on_progress=on_progress)
    with Engine.open(bundle) as engine:
        print(f"\n> {prompt}\n", flush=True)
        params = SamplingParams(max_tokens=200, temperature=0)
        completion = generate.show(engine, generate.build_prompt(engine, prompt), params)
        print("\n" + generate.speed(completion))
        size = sum(path.stat().st_size for path in bundle.iterdir())
        stats = engine.stats()
        print(
            f"bundle {size / 1e6:.1f} MB, KV cache {stats.kv_bytes / 1e6:.0f} MB, "
            f"peak {stats.peak_blocks_used} of {stats.blocks_total} blocks used"
        )


if __name__ == "__main__":
    sys.exit(main())
