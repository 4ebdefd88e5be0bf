"""Weights from checkpoint to file, as a stream: a few rows at a time are read, quantized and written.

Gate and up alternate in tiles of 16 rows: the op then has both factors of an output at hand.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from pagelet.exporter.checkpoint import Checkpoint
from pagelet.exporter.stacked_rows import (
    PIECE,
    PLAIN,
    Float32,
    StackedRows,
    Treatment,
    WeightFormat,
    read_finite,
)
from pagelet.models.manifest import TensorEntry
from pagelet.models.spec import ModelSpec
from pagelet.plugins.packing import LinearFormat

WEIGHTS_NAME = "model.weights"
# A cache line: the kernels then load whole vectors without crossing two.
_ALIGNMENT = 64
# Not learned, and the same in all checkpoints (transformers' XIELUActivation).
_XIELU_BETA, _XIELU_EPSILON = 0.5, -1e-6
# The types of the ops, as users and the manifest call them.
_TYPE_NAMES = {"f16": "fp16", "f32": "fp32"}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a weights file, bytes [offset, offset + length).

    `dtype`: "float32" or "uint8" for the CPU; "float16", "bfloat16", "float8" (E4M3) or "int4" (two to a
    byte, the first in its low half) for others.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    length: int


@dataclass(frozen=True)
class Linear:
    """A linear layer y = x Wᵀ + b as stored."""

    in_features: int
    out_features: int
    format: WeightFormat
    weight: StoredTensor
    bias: StoredTensor | None = None
    gated: bool = False  # the outputs are pairs of tiles, gate and up
    activation_parameters: tuple[float, ...] = ()  # of an activation that learns some
    scales: StoredTensor | None = None  # where a target's op wants them apart from the codes
    input_scale: float = 0.0  # of inputs that are rounded to FP8, all alike; 0: they are not


@dataclass(frozen=True)
class StoredWeights:
    """All weights of a model by module name; the head is the embedding itself where they are tied."""

    linears: dict[str, Linear]
    vectors: dict[str, StoredTensor]
    entries: dict[str, TensorEntry]


class WeightsFile:
    """Appends tensors to one file, each aligned; the file is mapped at run time."""

    def __init__(self, path: Path, keep: int = 0) -> None:
        """`keep`: bytes of an existing file to go on behind; 0 begins a new one."""
        self._stream: BinaryIO = path.open("r+b" if keep else "wb")
        self._stream.truncate(keep)
        self._stream.seek(keep)

    def __enter__(self) -> "WeightsFile":
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    @property
    def length(self) -> int:
        """Bytes so far."""
        return self._stream.tell()

    def flush(self) -> None:
        """Whoever maps the file now finds all tensors so far, even after a power cut."""
        self._stream.flush()
        os.fsync(self._stream.fileno())

    def add(
        self, name: str, dtype: str, shape: tuple[int, ...], pieces: Iterator[NDArray[np.generic]]
    ) -> StoredTensor:
        offset = -(-self._stream.tell() // _ALIGNMENT) * _ALIGNMENT
        self._stream.write(b"\0" * (offset - self._stream.tell()))
        for piece in pieces:
            self._stream.write(np.ascontiguousarray(piece).data)
        return StoredTensor(name, dtype, shape, offset, self._stream.tell() - offset)


class WeightsWriter:
    """Writes a model's tensors into a weights file, and keeps account of them in `stored`."""

    def __init__(
        self, checkpoint: Checkpoint, file: WeightsFile, stored: StoredWeights | None = None
    ) -> None:
        self._checkpoint = checkpoint
        self._file = file
        self.stored = stored or StoredWeights({}, {}, {})

    def linear(
        self, module: str, roles: Sequence[str], format: WeightFormat, treatment: Treatment = PLAIN
    ) -> None:
        """A matrix, a piece at a time, with its bias.

        Raises:
            CheckpointError: a tensor holds NaN or infinity, or does not fit the format; by its name.
        """
        rows = stacked(self._checkpoint, module, roles, format, treatment)
        bias = None
        if roles[0] + ".bias" in self._checkpoint.weights:
            values = [self._scaled(role, ".bias", treatment.output_scales) for role in roles]
            bias_values = np.concatenate(values)
            if ".experts." in module:  # [experts, outputs]
                together = 2 if module.endswith(".gate_up") else 1
                bias_values = bias_values.reshape(len(roles) // together, -1)
            bias = self._vector(module + ".bias", bias_values)
        size = format.packed_bytes(rows.width, rows.count)
        weight = self._file.add(module + ".weight", "uint8", (size,), rows.pieces())
        assert weight.length == size, f"{module}: packed {weight.length} bytes, expected {size}"
        self.stored.linears[module] = Linear(
            rows.width,
            rows.count,
            format,
            weight,
            bias,
            gated=module.endswith(".gate_up"),
            activation_parameters=self._activation_parameters(module),
        )
        self.stored.entries[module] = TensorEntry(
            type_name(format),
            (rows.count, rows.width),
            size,
            format.group_size,
            symmetric=isinstance(format, LinearFormat) and not format.asymmetric,
            exact=rows.exact,
            error=rows.error,
        )

    def _activation_parameters(self, module: str) -> tuple[float, ...]:
        """xIELU's alpha_p, alpha_n, beta and eps (Huang and Schlag, 2024), the first two behind softplus."""
        at = module.rpartition(".")[0]
        if not module.endswith("mlp.up") or at + ".alpha_p.values" not in self._checkpoint.weights:
            return ()
        positive, negative = (
            float(
                np.logaddexp(0.0, read_finite(self._checkpoint, f"{at}.{name}.values").astype(np.float64))[0]
            )
            for name in ("alpha_p", "alpha_n")
        )
        return positive, negative, _XIELU_BETA, _XIELU_EPSILON

    def vector(self, role: str, scales: Mapping[str, Float32] | None = None) -> None:
        """A role as float32, ending included; divided by its scales where it has some."""
        stem, _, kind = role.rpartition(".")
        self.stored.vectors[role] = self._vector(role, self._scaled(stem, "." + kind, scales or {}))

    def tables(self, spec: ModelSpec) -> None:
        """What belongs to positions and to no layer: rotations, vectors, factors; and ones."""
        self.rope_tables(spec)
        self.position_table(spec)
        self.ones(spec)
        self.temperature(spec)
        self.layer_inputs(spec)

    def ones(self, spec: ModelSpec) -> None:
        """The weight of norms that have none."""
        sizes = {
            "norm.ones": spec.hidden_size if not spec.norm.weight or spec.embedding_norm else 0,
            "head_norm.ones": spec.layers[0].head_dim
            if spec.attention.norm and not spec.attention.norm_weight
            else 0,
        }
        for name, size in sizes.items():
            if size:
                self.stored.vectors[name] = self._vector(name, np.ones(size, np.float32))

    def rope_tables(self, spec: ModelSpec) -> None:
        """cos and sin of every position, in pieces: contexts of millions of tokens have large tables."""
        for index, rope in enumerate(spec.ropes):
            half = rope.rotary_dim // 2
            step = max(PIECE // half, 1)
            for which, name in enumerate((f"rope.{index}.cos", f"rope.{index}.sin")):
                pieces = (
                    rope.tables(min(step, spec.max_context - start), start)[which]
                    for start in range(0, spec.max_context, step)
                )
                self.stored.vectors[name] = self._file.add(name, "float32", (spec.max_context, half), pieces)

    def position_table(self, spec: ModelSpec) -> None:
        """The vectors of the positions that a context may have."""
        if spec.position_table:
            table = read_finite(self._checkpoint, "positions.weight", 0, spec.max_context)
            self.stored.vectors["positions.weight"] = self._vector("positions.weight", table)

    def layer_inputs(self, spec: ModelSpec) -> None:
        """The norm of the layers' own inputs."""
        if spec.layer_inputs:
            self.vector("layer_inputs.norm.weight")

    def temperature(self, spec: ModelSpec) -> None:
        """What queries are scaled by, position by position."""
        if spec.attention.temperature:
            positions = np.arange(spec.max_context) // spec.attention.temperature_context
            factors = 1 + spec.attention.temperature * np.log1p(positions)
            self.stored.vectors["temperature"] = self._vector(
                "temperature", factors.astype(np.float32)[:, None]
            )

    def _scaled(self, role: str, kind: str, scales: Mapping[str, Float32]) -> Float32:
        values = read_finite(self._checkpoint, role + kind)
        return values / scales[role] if role in scales else values

    def _vector(self, name: str, values: Float32) -> StoredTensor:
        return self._file.add(name, "float32", values.shape, iter([values]))


def stacked(
    checkpoint: Checkpoint,
    module: str,
    roles: Sequence[str],
    format: WeightFormat,
    treatment: Treatment = PLAIN,
) -> StackedRows:
    """The module's rows; those of gate and up alternate, expert after expert."""
    return StackedRows(
        checkpoint,
        [role + ".weight" for role in roles],
        format,
        interleaved=module.endswith(".gate_up"),
        treatment=treatment,
    )


def type_name(format: WeightFormat) -> str:
    """The storage as `--weights` and the manifest call it."""
    return _TYPE_NAMES.get(format.weight_type, format.weight_type)
