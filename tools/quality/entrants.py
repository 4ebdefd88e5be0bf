"""Who is compared: something that can be made, weighed and scored."""

from contextlib import AbstractContextManager
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

from pagelet.models.cache import cache_bytes_per_token
from pagelet.models.manifest import load_manifest
from pagelet.runtime import Engine, EngineConfig
from pagelet.tools.evaluate import Scorer
from pagelet.tools.quality.configurations import Configuration
from pagelet.tools.quality.export_process import ExportCost, export_apart
from pagelet.tools.quality.storage import Storage, bundle_storage


class Entrant(Protocol):
    """A way to store the model's weights.

    Attributes:
        file: name of the folder or file that is made.
        baseline: the entrant whose distance this one's is compared with; "" for none.
        made_from: all that what is made depends on, as JSON has it.
    """

    @property
    def name(self) -> str: ...

    @property
    def file(self) -> str: ...

    @property
    def baseline(self) -> str: ...

    @property
    def made_from(self) -> dict[str, Any]: ...

    def make(self, out: Path) -> ExportCost:
        """Write the model to `out`, which does not exist yet."""

    def storage(self, path: Path) -> Storage: ...

    def open(self, path: Path) -> AbstractContextManager[Scorer]: ...


class Bundle:
    """A bundle of ours, exported from `source`; it scores texts of up to `window` tokens."""

    def __init__(self, configuration: Configuration, source: Path, window: int, threads: int | None) -> None:
        self.name = self.file = configuration.name
        self.baseline = configuration.baseline
        self._options = configuration.options
        self._source = source
        self._window = window
        self._threads = threads

    @property
    def made_from(self) -> dict[str, Any]:
        return {
            "source": identity(self._source),
            "options": self._options,
            "made_by": f"pagelet {version('pagelet')}",
        }

    def make(self, out: Path) -> ExportCost:
        return export_apart(self._source, out, self._options)

    def storage(self, path: Path) -> Storage:
        return bundle_storage(load_manifest(path))

    def open(self, path: Path) -> AbstractContextManager[Engine]:
        return open_for_scoring(path, self._window, self._threads)


def open_for_scoring(bundle: Path, window: int, threads: int | None) -> Engine:
    """An engine whose cache has room for one text of `window` tokens, and that forgets it afterwards."""
    manifest = load_manifest(bundle)
    room = window + 2 * manifest.block_size
    memory = room * cache_bytes_per_token(manifest.spec, manifest.cache_type)
    return Engine.open(
        bundle, EngineConfig(threads=threads, kv_memory=memory, prefix_cache=False, speculate="off")
    )


def identity(source: Path) -> list[list[Any]]:
    """Name, size and time of change of a file, or of a folder's files."""
    files = sorted(source.iterdir()) if source.is_dir() else [source]
    return [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files if path.is_file()]
