"""The original model in full precision, one layer's weights in memory at a time, for `Layerwise` to run."""

import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from pagelet.exporter.checkpoint import Checkpoint
from pagelet.exporter.modules import layer_input_units, layer_units, layer_vectors, norm_vectors
from pagelet.exporter.part import Part
from pagelet.exporter.stacked_rows import PLAIN, Treatment, WeightFormat
from pagelet.exporter.weights import WEIGHTS_NAME, WeightsFile, WeightsWriter
from pagelet.models.spec import ModelSpec
from pagelet.plugins.float_packing import FloatFormat

Rounded = tuple[WeightFormat, Treatment]

ORIGINAL_PREFIX = "pagelet-original-"
# A checkpoint of 16 bits is held as it is: half the bytes, and the same numbers.
_OWN_TYPES = {"F16": "f16", "BF16": "bf16"}


class Original:
    """Parts of a checkpoint, unquantized, each written to a temporary folder when it is asked for.

    A context manager; closing it removes the folder. A part is valid until the next is asked for.
    """

    def __init__(
        self, checkpoint: Checkpoint, spec: ModelSpec, max_context: int, inside: Path | None = None
    ) -> None:
        """`max_context`: tokens of the longest text that will be run; `inside`: where the folder is made."""
        self._checkpoint = checkpoint
        self._spec = replace(spec, max_context=max(max_context, 1))
        self._home = tempfile.TemporaryDirectory(prefix=ORIGINAL_PREFIX, dir=inside)

    def embedding(self, rounded: Mapping[str, Rounded] | None = None) -> Part:
        units = [("embedding", ("embedding",)), *layer_input_units(self._spec)]
        return self._part(units, [], rounded or {}, positions=True)

    def layer(self, layer: int, rounded: Mapping[str, Rounded] | None = None) -> Part:
        """A layer; the modules that `rounded` names are written so."""
        vectors = layer_vectors(self._spec, layer)
        return self._part(layer_units(self._spec, layer), vectors, rounded or {}, rope=True)

    def head(self, rounded: Mapping[str, Rounded] | None = None) -> Part:
        head = "embedding" if self._spec.tie_embeddings else "head"
        return self._part([(head, (head,))], norm_vectors(self._spec, "final_norm"), rounded or {})

    def _part(
        self,
        units: Iterable[tuple[str, tuple[str, ...]]],
        vectors: Iterable[str],
        rounded: Mapping[str, Rounded],
        *,
        rope: bool = False,
        positions: bool = False,
    ) -> Part:
        folder = Path(self._home.name)
        (folder / WEIGHTS_NAME).unlink(missing_ok=True)  # a session that still maps it keeps its bytes
        with WeightsFile(folder / WEIGHTS_NAME) as file:
            writer = WeightsWriter(self._checkpoint, file)
            for module, roles in units:
                format, treatment = rounded.get(module, (self._own_format(roles), PLAIN))
                writer.linear(module, roles, format, treatment)
            for role in vectors:
                writer.vector(role)
            writer.ones(self._spec)
            if positions:
                writer.position_table(self._spec)
                writer.layer_inputs(self._spec)
            if rope:
                writer.rope_tables(self._spec)
                writer.temperature(self._spec)
        return Part(self._spec, writer.stored, folder)

    def _own_format(self, roles: tuple[str, ...]) -> FloatFormat:
        dtypes = {self._checkpoint.weights[role + ".weight"].dtype for role in roles}
        own = _OWN_TYPES.get(dtypes.pop()) if len(dtypes) == 1 else None
        return FloatFormat(own or "f32")

    def close(self) -> None:
        self._home.cleanup()

    def __enter__(self) -> "Original":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
