"""An export in a process of its own, so that its seconds and its memory are its own."""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagelet.models.errors import PageletError
from pagelet.tools.memory import peak_rss


@dataclass(frozen=True)
class ExportCost:
    """Seconds without the imports, and the largest resident size of the whole process; None: not known."""

    seconds: float
    peak_rss_bytes: int | None = None


class ExportFailed(PageletError):
    """The export refused its options or its checkpoint, or its process ended."""


def export_apart(source: Path, out: Path, options: dict[str, Any]) -> ExportCost:
    """Export into the new folder `out`; the process's progress and warnings go to stderr.

    Its temporary files stand beside `out`: when it is killed, whoever removes that folder removes them too.

    Raises:
        ExportFailed: says why.
    """
    arguments = [str(source), str(out), json.dumps(options)]
    done = subprocess.run(
        [sys.executable, "-m", __name__, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(out.parent)},
    )
    reply: dict[str, Any] = json.loads(done.stdout) if done.stdout else {}
    if "error" in reply or done.returncode:
        raise ExportFailed(reply.get("error", f"its process ended with status {done.returncode}"))
    return ExportCost(**reply)


def main(source: str, out: str, options: str) -> None:
    from pagelet.exporter import ExportOptions, export
    from pagelet.tools.progress import bar

    began = time.perf_counter()
    given = json.loads(options)
    if "calibration" in given:
        given["calibration"] = Path(given["calibration"])
    try:
        with bar(Path(out).name, "tensor") as on_progress:
            export(Path(source), Path(out), ExportOptions(**given), on_progress=on_progress)
    except PageletError as error:
        print(json.dumps({"error": str(error)}))
        return
    print(json.dumps({"seconds": time.perf_counter() - began, "peak_rss_bytes": peak_rss()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
