"""What a GGUF file says of its model: the keys under "{architecture}.", each checked for its type."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from pagelet.exporter.checkpoint.gguf_families import Key
from pagelet.models.errors import CheckpointError, UnsupportedError
from pagelet.models.strict import reject_unknown, require


class Section:
    """The keys under "{architecture}.", without that prefix.

    Raises:
        CheckpointError: a key is missing, or is not of its type.
    """

    def __init__(self, metadata: Mapping[str, Any], where: str) -> None:
        self.architecture: str = require(dict(metadata), "general.architecture", str, where, CheckpointError)
        self.where = f"{where}: {self.architecture}.*"
        prefix = self.architecture + "."
        self._data = {key.removeprefix(prefix): metadata[key] for key in metadata if key.startswith(prefix)}

    def present(self) -> list[str]:
        """Keys that are there and not zero."""
        return [key for key, value in self._data.items() if np.any(value)]

    def check(self, read: Iterable[str], only: Mapping[str, Any]) -> None:
        """Raise UnsupportedError for a key that nobody reads, or one of `only` that has another value."""
        reject_unknown(self._data, (*read, *only), self.where, UnsupportedError)
        for key, known in only.items():
            found = self._data.get(key, known)
            if np.ndim(found) or found != known:
                raise UnsupportedError(f"{self.where}: {key!r} is {found!r:.80}; known is {known!r} only.")

    def need(self, keys: Iterable[str]) -> None:
        """Raise CheckpointError for a key that is not there."""
        for key in keys:
            if key not in self:
                raise CheckpointError(f"{self.where}: {key!r} is missing.")

    def __contains__(self, key: str) -> bool:
        return key in self._data

    def text(self, key: str, default: str) -> str:
        return str(self._get(key, str, default))

    def flag(self, key: str, default: bool | None = None) -> bool:
        return bool(self._get(key, bool, default))

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number; some files have it once for each layer."""
        value = self._data.get(key)
        if isinstance(value, np.ndarray) and value.size and np.issubdtype(value.dtype, np.integer):
            if (value != value[0]).any():
                raise UnsupportedError(f"{self.where}: {key!r} differs from layer to layer; not known of it.")
            return int(value[0])
        return int(self._get(key, int, default))

    def integers(self, key: str) -> list[int]:
        """As the file has it: one for each layer, or one."""
        value = self._data.get(key)
        if isinstance(value, np.ndarray) and np.issubdtype(value.dtype, np.integer):
            return [int(item) for item in value]
        return [self.integer(key)]

    def positive(self, key: str, default: float | None = None) -> float:
        value = float(self._get(key, (int, float), default))
        if not 0 < value < math.inf:
            raise CheckpointError(f"{self.where}: {key!r} is {value}; expected a positive number.")
        return value

    def values(self, keys: Mapping[str, Key]) -> dict[str, Any]:
        """By their names in config.json, those that are there."""
        read = {int: self.integer, float: self.positive, bool: self.flag}
        return {wanted.config: read[wanted.kind](key) for key, wanted in keys.items() if key in self}

    def layers(self, key: str) -> list[bool] | int | None:
        """Of a key that has a flag for each layer, or one number."""
        value = self._data.get(key)
        if isinstance(value, np.ndarray):
            return [bool(item) for item in value]
        return None if value is None else self.integer(key)

    def _get(self, key: str, kind: type | tuple[type, ...], default: Any) -> Any:
        if key not in self._data and default is not None:
            return default
        return require(self._data, key, kind, self.where, CheckpointError)
