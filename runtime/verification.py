"""Replaying a bundle's golden prompts on this device: does it compute what it did when it was exported?"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from pagelet.models.certificate import (
    Certificate,
    GoldenPrompt,
    TopLogits,
    load_certificate,
    load_layer_outputs,
    logits_digest,
    point_names,
    point_values,
)
from pagelet.models.errors import BackendError, BundleError
from pagelet.models.manifest import Manifest
from pagelet.plugins.native import kernel_arithmetic
from pagelet.plugins.whole_graph import CacheArrays, WholeGraph
from pagelet.runtime.backends.base import Float32Array
from pagelet.runtime.cores import CORES, physical_cores
from pagelet.runtime.device_replay import replay_on_device

Float64Array = NDArray[np.float64]
Status = Literal["match", "drift", "broken", "unproven"]

# How far another device's arithmetic may lead, relative to a row; linear over the depth. Measured between
# the portable kernels and AVX2: with integer weights, where an activation next to a tie is rounded the other
# way, 0.011 behind 3 and 0.08 behind 30 layers (SmolLM2 int4); with float32 3e-6. Three times the former, and
# much more of the latter, since an f16 cache rounds too (5e-4); exchanged layers give 0.4 to 1.2, a doubled
# base of the rotation 0.15 at the first layer.
ROUNDED_TOLERANCE = (0.05, 0.25)
FLOAT_TOLERANCE = (1e-3, 1e-3)


@dataclass(frozen=True)
class Verification:
    """What a replay found.

    Attributes:
        status: "match": every recorded number to the bit; "drift": this device's arithmetic is another than
            the exporter's, and all rows are within `tolerance`; "broken": neither; "unproven": the bundle has
            no certificate.
        first_difference: where a broken bundle begins to differ: "embedding", "layers.3.attention",
            "layers.3.mlp" or "head".
        deviation: root mean square difference over root mean square, of the recorded row (or a prompt's
            recorded logits) that differs most: at `first_difference`, or anywhere.
        arithmetic, certified_arithmetic: see `kernel_arithmetic`.
        agreement, certified_agreement: share of the golden positions at which the likeliest token is the
            original's.
    """

    status: Status
    first_difference: str = ""
    deviation: float = 0.0
    tolerance: float = 0.0
    arithmetic: str = ""
    certified_arithmetic: str = ""
    agreement: float | None = None
    certified_agreement: float | None = None
    seconds: float = 0.0

    @property
    def explanation(self) -> str:
        """What the status means and what to do, as the end of a sentence about the bundle."""
        if self.status == "unproven":
            return "has no certificate: its files are whole, but what it computes was not checked."
        if self.status == "match":
            return "computes, to the bit, what it computed when it was exported."
        other = f"other arithmetic ({self.arithmetic} here, {self.certified_arithmetic} at the export)"
        if self.status == "drift":
            return (
                f"computes what it should within the tolerance of {other}: rows deviate by up to "
                f"{self.deviation:.2g}, at most {self.tolerance:.2g} are expected."
            )
        allowed = f"; {other} explains at most {self.tolerance:.2g}" if self.tolerance else ""
        return (
            f"is broken: from {self.first_difference} on it computes other numbers than when it was exported "
            f"(a row deviates by {self.deviation:.2g}{allowed}). Export or copy it again; if that does not "
            "help, this machine or this build of pagelet computes wrongly."
        )

    def to_json(self) -> dict[str, Any]:
        """JSON has no infinity: a deviation of rows that are not finite is null."""
        return {**asdict(self), "deviation": self.deviation if math.isfinite(self.deviation) else None}


@dataclass(frozen=True)
class _Replayed:
    """A prompt's numbers as computed here: the residual streams at its stored rows, and its logits."""

    prompt: GoldenPrompt
    outputs: Float32Array  # [points, rows, hidden]
    recorded: Float32Array  # of the same shape
    logits: Float32Array  # [positions, vocab]


def replay(folder: Path, manifest: Manifest, threads: int | None = None) -> Verification:
    """Run the golden prompts of a bundle whose files are as the manifest says; None: the physical cores.

    Raises:
        BundleError: the certificate is damaged, or the graph is not one that it could be of; or the bundle is
            for another device.
        BackendError: ONNX Runtime or the op library, or the bundle's device, is missing.
    """
    start = perf_counter()
    certificate = load_certificate(folder, manifest)
    if certificate is None:
        return Verification("unproven")
    if manifest.gpu is None:
        here, names = kernel_arithmetic(), (*point_names(manifest.spec.num_layers), "head")
        replayed = list(_replay(folder, manifest, certificate, threads or physical_cores()))
    else:  # its layers cannot be looked into
        here, names = manifest.gpu.engine_version or "ONNX Runtime on CUDA", ("head",)
        nothing = np.empty((0, 0, 0), np.float32)
        replayed = [
            _Replayed(prompt, nothing, nothing, logits)
            for prompt, logits in replay_on_device(folder, manifest, certificate)
        ]
    same = here == certificate.arithmetic
    deviations = {name: max(_deviation(run, point) for run in replayed) for point, name in enumerate(names)}
    if same and not all(_same_logits(run) for run in replayed):
        deviations["head"] = max(deviations["head"], float(np.finfo(np.float32).tiny))
    limits = dict(zip(names, np.zeros(len(names)) if same else _tolerances(manifest), strict=True))
    first = next((name for name in names if deviations[name] > limits[name]), "")
    return Verification(
        status="broken" if first else "match" if same else "drift",
        first_difference=first,
        deviation=deviations[first] if first else max(deviations.values()),
        tolerance=float(limits[first or "head"]),
        arithmetic=here,
        certified_arithmetic=certificate.arithmetic,
        agreement=_agreement(replayed),
        certified_agreement=certificate.agreement,
        seconds=perf_counter() - start,
    )


def _tolerances(manifest: Manifest) -> Float64Array:
    """Of each point and the head; of a GPU's bundle the head alone."""
    if manifest.gpu is not None:
        return np.array([ROUNDED_TOLERANCE[1]])  # its activations are rounded to 16 bits or fewer
    rounded = manifest.quantization.weights in ("int4", "int8") or manifest.cache_type in ("int8", "fp8")
    first, last = ROUNDED_TOLERANCE if rounded else FLOAT_TOLERANCE
    return np.linspace(first, last, 2 * manifest.spec.num_layers + 2)


def _replay(folder: Path, manifest: Manifest, certificate: Certificate, threads: int) -> Iterator[_Replayed]:
    recorded = load_layer_outputs(folder, manifest, certificate)
    model = _open(folder / manifest.graph, manifest, threads)
    rows = np.asarray(certificate.layer_rows)
    ends = list(accumulate(len(prompt.token_ids) for prompt in certificate.golden))
    for prompt, end in zip(certificate.golden, ends, strict=True):
        length = len(prompt.token_ids)
        mine = (end - length <= rows) & (rows < end)
        last = range(length - prompt.positions, length)
        taken = CORES.acquire(threads)
        try:
            logits, taps = model.run(prompt.token_ids, prompt.position_ids, last)
        except Exception as error:
            raise BundleError(f"the golden prompts cannot be replayed: {error}. Export it again.") from error
        finally:
            CORES.release(taken)
        outputs = np.stack([tap[rows[mine] - (end - length)] for tap in taps])
        yield _Replayed(prompt, outputs, recorded[:, mine], logits)


def _open(graph: Path, manifest: Manifest, threads: int) -> WholeGraph:
    spec = manifest.spec
    caches = CacheArrays(
        manifest.cache_type,
        manifest.block_size,
        {i: (spec.layers[i].num_kv_heads, spec.layers[i].head_dim) for i in spec.cache_owners},
        len(spec.window_groups),
    )
    try:
        return WholeGraph(graph, caches, point_values(spec.num_layers), threads=threads)
    except (ImportError, FileNotFoundError) as error:
        raise BackendError(f"the golden prompts need ONNX Runtime and the op library: {error}") from error
    except Exception as error:  # ONNX Runtime's exception classes are private
        raise BundleError(
            f"{graph} cannot be replayed, or is not what the certificate is of: {error}. Export it again."
        ) from error


def _deviation(run: _Replayed, point: int) -> float:
    """Of a prompt's row that differs most at a point; behind the last one, of its recorded logits together.

    Together, because a logit's zero means nothing: those of one position may all happen to be small.
    """
    if point < len(run.outputs):
        return _relative(run.outputs[point], run.recorded[point])
    ids = np.array([top.ids for top in run.prompt.top])
    recorded = np.array([top.logits for top in run.prompt.top], np.float32)
    return _relative(np.take_along_axis(run.logits, ids, 1).reshape(1, -1), recorded.reshape(1, -1))


def _relative(values: Float32Array, recorded: Float32Array) -> float:
    """The largest of the rows' relative root mean square differences."""
    if not np.isfinite(values).all():
        return float("inf")
    difference = np.linalg.norm(np.subtract(values, recorded, dtype=np.float64), axis=1)
    scale = np.linalg.norm(recorded.astype(np.float64), axis=1)
    ratios = np.divide(difference, scale, out=np.where(difference > 0, np.inf, 0.0), where=scale > 0)
    return float(ratios.max(initial=0.0))


def _same_logits(run: _Replayed) -> bool:
    """All of them, not only the largest."""
    same_top = tuple(map(TopLogits.of, run.logits)) == run.prompt.top
    return same_top and logits_digest(run.logits) == run.prompt.logits_sha256


def _agreement(replayed: list[_Replayed]) -> float:
    ours = np.concatenate([run.logits.argmax(1) for run in replayed])
    return float((ours == np.concatenate([run.prompt.reference_tokens for run in replayed])).mean())
