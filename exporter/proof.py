"""The certificate of an export, and whether it lets the bundle pass."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import onnx_ir as ir

from pagelet.exporter.calibration.corpus import golden_prompts, held_out_texts
from pagelet.exporter.certificate import certify
from pagelet.exporter.graph import CacheFormat, build_graph
from pagelet.exporter.job import Job
from pagelet.exporter.options import ExportOptions
from pagelet.exporter.part import Part
from pagelet.models.certificate import CERTIFICATE_NAME, OUTPUTS_NAME, Certificate
from pagelet.models.errors import InputError, UnfinishedError
from pagelet.models.text import Tokenizer

# Golden prompts: long enough that attention has something to read, short enough to replay in a moment.
_PROMPTS, _PROMPT_TOKENS = 4, 48
_STAND_IN = ".stand-in.onnx"


def prove(job: Job, bundle: Part, tokenizer: Tokenizer, graph: Path) -> str:
    """Certify a bundle whose graph is written; the certificate's file name, or "" where none was wanted.

    Raises:
        UnfinishedError: the bundle is further from the original than allowed, and `accept_loss` is not set.
        CheckpointError, BundleError: original or bundle compute NaN or infinity; the layer is named.
    """
    options = job.options
    for name in (CERTIFICATE_NAME, OUTPUTS_NAME):  # of an export that stopped behind it
        (graph.parent / name).unlink(missing_ok=True)
    if options.certificate_seconds is None:
        return ""
    context = bundle.spec.max_context
    texts = held_out_texts(tokenizer, min(1024, context))
    prompts = golden_prompts(tokenizer, min(_PROMPT_TOKENS, context), _PROMPTS)
    if not texts or not prompts:
        raise InputError(
            "the tokenizer, or a context this short, leaves no text to compare bundle and original on; "
            "export with --no-certificate."
        )
    with _runnable_graph(bundle, job.cache, graph) as stand_in:
        certificate = certify(
            job.checkpoint,
            bundle.runnable,
            job.cache,
            texts,
            prompts,
            graph=stand_in,
            seconds=options.certificate_seconds,
            on_progress=job.on_progress,
        )
    limit = options.kl_limit
    forced = not certificate.quality.mean_kl <= limit
    if forced and not options.accept_loss:
        raise UnfinishedError(_refusal(certificate, options, graph.parent))
    replace(certificate, max_kl=limit, forced=forced).save(graph.parent)
    return CERTIFICATE_NAME


@contextmanager
def _runnable_graph(bundle: Part, cache: CacheFormat, graph: Path) -> Iterator[Path]:
    """The bundle's graph as the CPU runs it: a device's has the same roundings and the CPU's attention."""
    if bundle.stand_in is None:
        yield graph
        return
    stand_in = graph.with_name(_STAND_IN)
    try:
        ir.save(build_graph(bundle.runnable, cache), stand_in)
        yield stand_in
    finally:
        stand_in.unlink(missing_ok=True)


def _refusal(certificate: Certificate, options: ExportOptions, folder: Path) -> str:
    quality = certificate.quality
    layers = ", ".join(f"{each.layer} ({each.error:.1%})" for each in certificate.worst_layers(3))
    ways = []
    if options.weights == "int4":
        ways += ["--quantizer gptq"] * (not options.is_calibrated) + ["a smaller --group-size"]
        ways.append(f"--weights {'int8' if 'int8' in options.row.weights else 'fp16'}")
    elif options.weights in ("int8", "fp8"):
        ways.append("wider --weights")
    if options.cache_type in ("int8", "fp8"):
        ways.append("--kv f16")
    better = " or ".join(ways) or ("other --activations" if options.row.is_gpu else "--kv f32")
    return (
        f"the bundle is further from the original than allowed: mean KL divergence {quality.mean_kl:.4f} "
        f"nats, limit {options.kl_limit:g} (perplexity {quality.reference_perplexity:.2f} before, "
        f"{quality.perplexity:.2f} after; the same first choice for {quality.top1_agreement:.1%} of "
        f"{quality.tokens} tokens; layers with the largest error: {layers}). To lose less take {better}; "
        f"to keep the bundle all the same, --accept-loss or a higher --max-kl. What was quantized waits in "
        f"{folder}."
    )
