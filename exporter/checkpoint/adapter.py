"""A checkpoint with a LoRA adapter merged into it, row by row as it is read, in float32.

PEFT's names: `base_model.model.X.lora_A.weight` [rank, in] and `.lora_B.weight` [out, rank] change X.weight
to W + s · B A; `.lora_embedding_A` [rank, vocabulary] and `.lora_embedding_B` [hidden, rank] an embedding
to W + s · (B A)ᵀ; `.lora_magnitude_vector` [out] then gives each output its length (Liu et al. 2024, DoRA,
section 4.1). What has a name of the model itself replaces it.
"""

import re
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagelet.exporter.checkpoint.adapter_config import LoraConfig, is_of, read_config
from pagelet.exporter.checkpoint.base import Blocks, Checkpoint, Fp8Rows
from pagelet.exporter.checkpoint.files import SourceFile
from pagelet.exporter.checkpoint.packed.base import FLOATS, Parts, as_floats
from pagelet.exporter.checkpoint.safetensors_header import read_header
from pagelet.exporter.checkpoint.tensor_info import TensorInfo
from pagelet.models.errors import CheckpointError, UnsupportedError
from pagelet.models.manifest import hash_file
from pagelet.models.names import Part
from pagelet.models.weight_shapes import Role, source_name

WEIGHTS_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_FACTORS = ("lora_A.weight", "lora_B.weight")
_OF_EMBEDDINGS = ("lora_embedding_A", "lora_embedding_B")
_MAGNITUDES = ("lora_magnitude_vector", "lora_magnitude_vector.weight")
_WRAPPER = re.compile(r"\.(base_layer|modules_to_save)(?=\.(weight|bias)$)")
_NAMED = 5


@dataclass(frozen=True)
class _Change:
    """What becomes of one weight: replaced, then the product of the factors added, then scaled.

    Attributes:
        factors: A and B; of an embedding [rank, out] and [in, rank], else [rank, in] and [out, rank].
        magnitude: float32 [out]; the length of each output.
    """

    whole: TensorInfo | None = None
    factors: tuple[TensorInfo, TensorInfo] | None = None
    scaling: float = 1.0
    of_embedding: bool = False
    magnitude: TensorInfo | None = None


class AdaptedCheckpoint(Checkpoint):
    """Weights that the adapter touches have no codes of their own any more; all others are the base's."""

    def __init__(
        self, base: Checkpoint, folder: Path, file: SourceFile, parts: Parts, config: LoraConfig
    ) -> None:
        self._changes = _changes(base, parts, config, str(folder))
        sources = {role: base.source(role) for role in base.weights}
        super().__init__(base.path, base.spec, {}, base.tensors, sources, base.text_source, base.notes)
        for role in self._changes:
            info = self.weights[role]
            self.weights[role] = replace(info, dtype=info.dtype + "+LoRA")
        self.kind = base.kind
        self._base, self._file, self._parts = base, file, parts
        self._about = {
            "name": folder.resolve().name,
            "sha256": hash_file(file.path),
            "settings": asdict(config),
        }

    def read(self, role: str, start: int = 0, stop: int | None = None) -> NDArray[np.float32]:
        change = self._changes.get(role)
        if change is None:
            return self._base.read(role, start, stop)
        start, stop = self._rows(role, start, stop)
        if change.whole:
            values = self._from_folder(role, self._of(role, change.whole, start, stop))
        else:
            values = self._base.read(role, start, stop)
        with np.errstate(all="ignore"):  # what is no number is for the quantizer to report
            if change.factors:
                values = values + np.float32(change.scaling) * self._product(role, change, start, stop)
            if change.magnitude:
                lengths = np.linalg.norm(values, axis=1)
                values *= (self._of(role, change.magnitude, start, stop) / lengths)[:, None]
        return values

    def _of(self, role: str, info: TensorInfo, start: int, stop: int) -> NDArray[np.float32]:
        """The role's rows of a tensor that has those of everything fused with it."""
        low, high, picked = self._base.source(role).span(start, stop)
        values = as_floats(self._parts.rows(info, low, high))
        return values if picked is None else values[picked]

    def _product(self, role: str, change: _Change, start: int, stop: int) -> NDArray[np.float32]:
        """Rows of B A, or of (B A)ᵀ."""
        assert change.factors
        a, b = change.factors
        if change.of_embedding:
            left, right = as_floats(self._parts.columns(a, start, stop).T), self._parts.whole(b).T
        else:
            left, right = self._of(role, b, start, stop), self._parts.whole(a)
        product: NDArray[np.float32] = left @ as_floats(right)
        return product

    def read_blocks(self, role: str, start: int = 0, stop: int | None = None) -> Blocks | None:
        return None if role in self._changes else self._base.read_blocks(role, start, stop)

    def read_fp8(self, role: str, start: int = 0, stop: int | None = None) -> Fp8Rows | None:
        return None if role in self._changes else self._base.read_fp8(role, start, stop)

    def obstacle(self, role: str) -> str:
        own = self._base.obstacle(role)
        if role in self._changes and (own or self._base.read_blocks(role, 0, 1)):
            return "an adapter is merged into them"
        return own

    def use(self, role: str, info: TensorInfo) -> None:
        self._changes.pop(role, None)
        self._base.use(role, info)
        super().use(role, info)

    def describe(self) -> dict[str, Any]:
        return self._base.describe() | {"adapter": self._about}

    def close(self) -> None:
        self._base.close()
        self._file.close()


def open_adapted(base: Checkpoint, folder: Path) -> AdaptedCheckpoint:
    """`base` with the adapter of a PEFT folder merged into it; closes `base` when it is closed, or fails.

    Raises:
        CheckpointError: the adapter is damaged, incomplete, or of another model.
        UnsupportedError: another kind of adapter, or a setting that is not known.
    """
    with ExitStack() as stack:
        stack.callback(base.close)
        if not folder.is_dir():
            raise CheckpointError(f"{folder} is no folder; give the one with adapter_config.json.")
        config = read_config(folder)
        if not (folder / WEIGHTS_FILE).exists():
            raise CheckpointError(
                f"{folder} has no {WEIGHTS_FILE}; adapters in .bin files are pickled and never read: save it "
                "as safetensors."
            )
        file = SourceFile(folder / WEIGHTS_FILE)
        stack.callback(file.close)
        parts = Parts(read_header(file), {file.path.name: file})
        adapted = AdaptedCheckpoint(base, folder, file, parts, config)
        stack.pop_all()
    return adapted


@dataclass
class _Found:
    """The adapter's tensors of one weight: their names, by what they are."""

    whole: str = ""
    parts: dict[str, str] = field(default_factory=dict)


def _changes(base: Checkpoint, parts: Parts, config: LoraConfig, where: str) -> dict[str, _Change]:
    """By role; every tensor of the adapter belongs to one."""
    roles: dict[str, list[str]] = {}
    for role in base.weights:  # several, where they are fused
        roles.setdefault(source_name(role, base.spec.row.names), []).append(role)
    found: dict[str, _Found] = {}
    foreign = []
    for tensor in parts.left:
        weight, part = _place(tensor)
        if weight not in roles:
            foreign.append(tensor)
        elif part:
            found.setdefault(weight, _Found()).parts[part] = tensor
        else:
            found.setdefault(weight, _Found()).whole = tensor
    if foreign or not found:
        rest = f" and {len(foreign) - _NAMED} more" if len(foreign) > _NAMED else ""
        names = ", ".join(foreign[:_NAMED]) or "no tensor"
        raise CheckpointError(
            f"{where}: {names}{rest} matches no weight of this model; is it an adapter of another one?"
        )
    _check_saved(found, config, where)
    changes: dict[str, _Change] = {}
    for weight, tensors in found.items():
        _check_order(base, weight, roles[weight][0])
        change = _change(_whole_shape(base, roles[weight][0]), weight, tensors, parts, config)
        changes |= dict.fromkeys(roles[weight], change)
    if parts.left:
        raise CheckpointError(f"{where}: {next(iter(parts.left))} is not expected beside the settings.")
    if base.spec.tie_embeddings and "embedding.weight" in changes:
        raise UnsupportedError(
            f"{where} changes the embedding, which this model shares with its head: whether the head changes "
            "too is not said. Merge it with PEFT first."
        )
    return changes


def _check_order(base: Checkpoint, weight: str, role: str) -> None:
    """A GGUF file has the rows of some fused tensors in another order than the adapter's."""
    part = base.spec.row.names[Role.parse(role).stem]
    fused = isinstance(part, Part) and (part.by_head or part.pairs or part.experts or part.transposed)
    if fused and base.kind == "gguf":
        raise UnsupportedError(
            f"the adapter changes {weight}, whose rows a GGUF file has in another order; "
            "export the folder of the original."
        )


def _place(tensor: str) -> tuple[str, str]:
    """The name of the weight that it belongs to, and which part of a change it is; "" for all of it."""
    name = tensor.removeprefix(_PREFIX) if tensor.startswith(_PREFIX) else ""
    for part in (*_FACTORS, *_OF_EMBEDDINGS, *_MAGNITUDES):
        if name.endswith("." + part):
            return name.removesuffix(part) + "weight", part
    return _WRAPPER.sub("", name), ""


def _check_saved(found: Mapping[str, _Found], config: LoraConfig, where: str) -> None:
    whole = [weight.rpartition(".")[0] for weight, tensors in found.items() if tensors.whole]
    for ending in config.modules_to_save:
        if not any(is_of(module, ending) for module in whole):
            raise CheckpointError(f"{where}: modules_to_save names {ending!r:.60}, but no tensor is of it.")


def _whole_shape(base: Checkpoint, role: str) -> tuple[int, ...]:
    """[out, in] of the tensor that the role is in, with all that is fused there."""
    source = base.source(role)
    return source.info.shape[::-1] if source.transposed else source.info.shape


def _change(shape: tuple[int, ...], weight: str, found: _Found, parts: Parts, config: LoraConfig) -> _Change:
    whole = parts.take(found.whole, FLOATS, shape) if found.whole else None
    if not found.parts:
        return _Change(whole)
    module = weight.removesuffix(".weight")
    if len(shape) != 2:
        raise CheckpointError(f"{weight} is {list(shape)}; factors of a LoRA change matrices alone.")
    rank, (outputs, inputs) = config.rank_of(module), shape
    of_embedding = not found.parts.keys().isdisjoint(_OF_EMBEDDINGS)
    first, second = (
        found.parts.get(part, f"{_PREFIX}{module}.{part}")
        for part in (_OF_EMBEDDINGS if of_embedding else _FACTORS)
    )
    a = parts.take(first, FLOATS, (rank, outputs if of_embedding else inputs))
    b = parts.take(second, FLOATS, (inputs if of_embedding else outputs, rank))
    magnitude = None
    if config.use_dora:
        if of_embedding:
            raise UnsupportedError(f"{first}: DoRA of an embedding is not known. Merge it with PEFT first.")
        names = [found.parts[part] for part in _MAGNITUDES if part in found.parts]
        name = names[0] if names else f"{_PREFIX}{module}.{_MAGNITUDES[0]}"
        magnitude = parts.take(name, FLOATS, (outputs,))
    return _Change(whole, (a, b), config.scaling(module), of_embedding, magnitude)
