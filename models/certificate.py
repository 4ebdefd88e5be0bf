"""The certificate: how far a bundle is from its original, and what it must compute on any device.

The exporter writes it beside the weights; the runtime replays it, and trusts none of its numbers.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pagelet.models.errors import BundleError
from pagelet.models.manifest import Manifest
from pagelet.models.spec import ModelSpec
from pagelet.models.strict import decode

CERTIFICATE_NAME = "certificate.json"
OUTPUTS_NAME = "certificate.f32"
TOP = 8
"""Logits that are recorded at each position, or all of a smaller vocabulary."""

# A certificate has some ten kilobytes; what it holds is what a few seconds can replay.
MAX_CERTIFICATE_BYTES = 4 << 20
MAX_PROMPTS = 64
MAX_TOKENS = 4096  # of all golden prompts
MAX_ROWS = 64
_MAX_TEXT = 1_000
# As `pagelet.plugins.native.kernel_arithmetic` names it: roundings, lanes, and the version of the order.
_ARITHMETIC = re.compile(r"(fused|rounded)-(4|8|16)\.\d{1,6}")


@dataclass(frozen=True)
class Quality:
    """Over held-out text, bundle against original; KL divergences in nats, from the original to the bundle.

    Attributes:
        tokens: that were scored.
        top1_agreement: share of them at which both have the same likeliest token.
    """

    tokens: int
    perplexity: float
    reference_perplexity: float
    mean_kl: float
    p99_kl: float
    top1_agreement: float


@dataclass(frozen=True)
class LayerError:
    """Relative root mean square differences to the original.

    Attributes:
        error: of what the layer adds to the residual stream, given the original's own input.
        drift: of the residual streams of the two whole runs behind the layer.
    """

    layer: int
    error: float
    drift: float


@dataclass(frozen=True)
class TopLogits:
    """The largest logits of a position, descending, and their tokens."""

    ids: tuple[int, ...]
    logits: tuple[float, ...]

    @classmethod
    def of(cls, logits: NDArray[np.float32]) -> "TopLogits":
        """Of one row [vocab]; of equal logits the lower id comes first."""
        ids = np.argsort(-logits, kind="stable")[:TOP]
        return cls(tuple(ids.tolist()), tuple(logits[ids].tolist()))


@dataclass(frozen=True)
class GoldenPrompt:
    """A text to replay.

    Attributes:
        token_ids, position_ids: one position for each token; ascending, and not always by one.
        positions: how many of the last positions are recorded below.
        reference_tokens: the original's likeliest token at each of them, given the prompt so far.
        reference_top, top: the largest logits there, of the original and of the bundle when it was exported.
        logits_sha256: hex, over all of the bundle's logits there, little-endian float32 [positions, vocab].
    """

    token_ids: tuple[int, ...]
    position_ids: tuple[int, ...]
    positions: int
    reference_tokens: tuple[int, ...]
    reference_top: tuple[TopLogits, ...]
    top: tuple[TopLogits, ...]
    logits_sha256: str


@dataclass(frozen=True)
class Certificate:
    """Everything that is in `certificate.json`.

    Attributes:
        arithmetic: of the kernels that computed it; see `pagelet.plugins.native.kernel_arithmetic`.
        layer_rows: of the golden prompts' tokens, one prompt behind another, those whose residual streams
            are recorded in the file `layer_outputs`: little-endian float32 [points, rows, hidden], with the
            points of `point_names`.
        seconds: that certifying took.
        note: which text it was, and how much of it.
        max_kl: the mean KL divergence that the export was held to; None: to none.
        forced: the bundle was kept although it is further away than that.
    """

    quality: Quality
    layers: tuple[LayerError, ...]
    golden: tuple[GoldenPrompt, ...]
    arithmetic: str
    layer_rows: tuple[int, ...]
    layer_outputs: str = OUTPUTS_NAME
    seconds: float = 0.0
    note: str = ""
    max_kl: float | None = None
    forced: bool = False

    def worst_layers(self, count: int) -> tuple[LayerError, ...]:
        """Those with the largest errors, descending."""
        return tuple(sorted(self.layers, key=lambda layer: (-layer.error, layer.layer))[:count])

    @property
    def agreement(self) -> float:
        """Share of the golden positions at which the exported bundle has the original's likeliest token."""
        tops = [top.ids[0] for prompt in self.golden for top in prompt.top]
        tokens = [token for prompt in self.golden for token in prompt.reference_tokens]
        return sum(map(int.__eq__, tops, tokens)) / len(tokens)

    def save(self, folder: Path) -> None:
        text = json.dumps(asdict(self), ensure_ascii=False, allow_nan=False)
        (folder / CERTIFICATE_NAME).write_text(text + "\n", encoding="utf-8")


def logits_digest(logits: NDArray[np.float32]) -> str:
    """`GoldenPrompt.logits_sha256`."""
    return hashlib.sha256(logits.astype("<f4").tobytes()).hexdigest()


def point_names(num_layers: int) -> tuple[str, ...]:
    """Where the residual stream is recorded, in graph order; `replay` names the first that differs."""
    parts = (f"layers.{layer}.{part}" for layer in range(num_layers) for part in ("attention", "mlp"))
    return ("embedding", *parts)


def point_values(num_layers: int) -> tuple[str, ...]:
    """The graph's values at these points."""
    parts = (f"/layers.{i}/{part}" for i in range(num_layers) for part in ("attention/o", "mlp/down"))
    return ("/embedding", *parts)


def load_certificate(folder: Path, manifest: Manifest) -> Certificate | None:
    """Read and check a bundle's certificate; None where it has none.

    Raises:
        BundleError: damaged, or something in it does not fit the model; by its name.
    """
    if not manifest.certificate:
        return None
    path = folder / manifest.certificate
    try:
        if path.stat().st_size > MAX_CERTIFICATE_BYTES:
            raise BundleError(f"{path} has more than {MAX_CERTIFICATE_BYTES} bytes; that is no certificate.")
        data = json.loads(path.read_text(encoding="utf-8"))
        certificate = decode(Certificate, data, str(path), BundleError)
        _check(certificate, manifest, str(path))
    except OSError as error:
        raise BundleError(f"{path} cannot be read: {error.strerror}. Export or copy it again.") from error
    except (ValueError, RecursionError, OverflowError) as error:
        raise BundleError(f"{path} is not valid JSON ({error}); export the bundle again.") from error
    return certificate


def load_layer_outputs(folder: Path, manifest: Manifest, certificate: Certificate) -> NDArray[np.float32]:
    """The recorded residual streams, float32 [points, rows, hidden].

    Raises:
        BundleError: the file is not that large, or cannot be read.
    """
    path = folder / certificate.layer_outputs
    spec = manifest.spec
    shape = (2 * spec.num_layers + 1, len(certificate.layer_rows), spec.hidden_size)
    try:
        if (size := path.stat().st_size) != 4 * math.prod(shape):
            raise BundleError(f"{path} has {size} bytes; float32 {list(shape)} has {4 * math.prod(shape)}.")
        values = np.fromfile(path, "<f4").astype(np.float32, copy=False).reshape(shape)
    except OSError as error:
        raise BundleError(f"{path} cannot be read: {error.strerror}. Export or copy it again.") from error
    if not np.isfinite(values).all():
        raise BundleError(f"{path} holds NaN or infinity; export the bundle again.")
    return values


def _check(certificate: Certificate, manifest: Manifest, where: str) -> None:
    spec = manifest.spec
    _check_quality(certificate.quality, where)
    if [layer.layer for layer in certificate.layers] != list(range(spec.num_layers)):
        raise BundleError(f"{where}: 'layers' are not the model's {spec.num_layers} layers in order.")
    for layer in certificate.layers:
        _number(f"{where}: layer {layer.layer}: 'error'", layer.error, 0.0)
        _number(f"{where}: layer {layer.layer}: 'drift'", layer.drift, 0.0)
    count = sum(len(prompt.token_ids) for prompt in certificate.golden)
    if not 1 <= len(certificate.golden) <= MAX_PROMPTS or count > MAX_TOKENS:
        raise BundleError(
            f"{where}: {len(certificate.golden)} golden prompts of {count} tokens; expected 1 to "
            f"{MAX_PROMPTS} of at most {MAX_TOKENS} in all."
        )
    for index, prompt in enumerate(certificate.golden):
        _check_prompt(prompt, spec, f"{where}: golden[{index}]")
    rows = certificate.layer_rows
    if not 1 <= len(rows) <= MAX_ROWS or not _ascending(rows) or not 0 <= rows[0] <= rows[-1] < count:
        raise BundleError(f"{where}: 'layer_rows' are not 1 to {MAX_ROWS} ascending rows below {count}.")
    if certificate.layer_outputs not in manifest.files:
        raise BundleError(f"{where}: {certificate.layer_outputs!r:.80} is not among the bundle's files.")
    _number(f"{where}: 'seconds'", certificate.seconds, 0.0)
    if certificate.max_kl is not None:
        _number(f"{where}: 'max_kl'", certificate.max_kl, 0.0)
    for name, text in (("arithmetic", certificate.arithmetic), ("note", certificate.note)):
        if len(text) > _MAX_TEXT or not text.isprintable():
            raise BundleError(f"{where}: {name!r} is not at most {_MAX_TEXT} printable characters.")
    if not _ARITHMETIC.fullmatch(certificate.arithmetic):
        raise BundleError(
            f"{where}: 'arithmetic' is {certificate.arithmetic!r:.80}, which no kernel has; export it again."
        )


def _check_quality(quality: Quality, where: str) -> None:
    _number(f"{where}: 'tokens'", quality.tokens, 1, 1 << 40)
    _number(f"{where}: 'perplexity'", quality.perplexity, 1.0)
    _number(f"{where}: 'reference_perplexity'", quality.reference_perplexity, 1.0)
    _number(f"{where}: 'mean_kl'", quality.mean_kl, 0.0)
    _number(f"{where}: 'p99_kl'", quality.p99_kl, 0.0)
    _number(f"{where}: 'top1_agreement'", quality.top1_agreement, 0.0, 1.0)


def _check_prompt(prompt: GoldenPrompt, spec: ModelSpec, where: str) -> None:
    length = len(prompt.token_ids)
    _ids(f"{where}: 'token_ids'", prompt.token_ids, spec.vocab_size)
    _ids(f"{where}: 'position_ids'", prompt.position_ids, spec.max_context)
    if len(prompt.position_ids) != length or not _ascending(prompt.position_ids):
        raise BundleError(f"{where}: 'position_ids' are not {length} ascending positions.")
    _number(f"{where}: 'positions'", prompt.positions, 1, length)
    for name in ("reference_tokens", "reference_top", "top"):
        if (found := len(getattr(prompt, name))) != prompt.positions:
            raise BundleError(f"{where}: {name!r} has {found} entries for {prompt.positions} positions.")
    if not re.fullmatch("[0-9a-f]{64}", prompt.logits_sha256):
        raise BundleError(
            f"{where}: 'logits_sha256' is {prompt.logits_sha256!r:.80}; expected 64 hex digits."
        )
    _ids(f"{where}: 'reference_tokens'", prompt.reference_tokens, spec.vocab_size)
    top = min(TOP, spec.vocab_size)
    for entry in (*prompt.reference_top, *prompt.top):
        if len(entry.ids) != top or len(entry.logits) != top:
            raise BundleError(f"{where}: a position has not {top} logits of {top} tokens.")
        _ids(f"{where}: 'ids'", entry.ids, spec.vocab_size)
        for logit in entry.logits:
            _number(f"{where}: 'logits'", logit, -float(np.finfo(np.float32).max))


def _ids(what: str, values: Iterable[int], end: int) -> None:
    for value in values:
        if not 0 <= value < end:
            raise BundleError(f"{what} has {value:.4g}; expected 0 to {end - 1}.")


def _ascending(values: tuple[int, ...]) -> bool:
    return all(a < b for a, b in pairwise(values))


def _number(what: str, value: float, low: float, high: float = float(np.finfo(np.float32).max)) -> None:
    if not low <= value <= high:  # nor is NaN
        raise BundleError(f"{what} is {value:.4g}; expected {low:.4g} to {high:.4g}.")
