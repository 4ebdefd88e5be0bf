"""What the attention nodes of one engine share: their kernels, and the errors of their callbacks.

TensorRT calls plugins from C++ and prints what they raise on stderr; the caller only learns that something
failed, and for some callbacks not even that: without aliases or a size of the workspace, an engine is built
all the same, and destroys memory when it runs. So each error is kept here, and `check` raises it.
"""

from __future__ import annotations

import threading
from typing import Any


class PluginError(RuntimeError):
    """A `PagedAttention` node could not be built or run."""


class PluginHost:
    """Belongs to one network that is built, or one engine that is loaded.

    Args:
        library: a `KernelLibrary` that launches the kernels; ``None`` while an engine is built.
    """

    def __init__(self, library: Any = None) -> None:
        self.library = library
        self._lock = threading.Lock()
        self._first: tuple[str, Exception] | None = None

    def record(self, callback: str, error: Exception) -> None:
        """Keeps the first error: later ones follow from it."""
        with self._lock:
            if self._first is None:
                self._first = callback, error

    def check(self) -> None:
        """To be called after parsing, building, loading, and a step that failed.

        Raises:
            PluginError: a callback failed since the last check.
        """
        with self._lock:
            first, self._first = self._first, None
        if first is not None:
            callback, error = first
            raise PluginError(f"PagedAttention plugin, {callback}: {error}") from error
