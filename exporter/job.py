"""What every part of one export shares."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pagelet.exporter.checkpoint import Checkpoint
from pagelet.exporter.graph import CacheFormat
from pagelet.exporter.options import ExportOptions
from pagelet.models.spec import ModelSpec

OnProgress = Callable[[int, int, str], None]
"""on_progress(steps done, steps in all, name of the next)."""
OnNote = Callable[[str], None]
"""Something that the user should be told."""


def silent(*_: object) -> None:
    """Progress and notes for callers who want none."""


@dataclass(frozen=True)
class Job:
    """One export.

    Attributes:
        spec: of the model as it is exported: the checkpoint's, cut as the options say.
        folder: that becomes the bundle; what is temporary stands there too.
        key: equal for exports that write the same bytes, so that one goes on where another was cut.
    """

    checkpoint: Checkpoint
    spec: ModelSpec
    options: ExportOptions
    folder: Path
    key: str = ""
    on_progress: OnProgress = silent
    on_note: OnNote = silent

    @property
    def cache(self) -> CacheFormat:
        return CacheFormat(self.options.tokens_per_block, self.options.cache_type)
