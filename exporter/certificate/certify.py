"""Certifying, on one page: how much text → original and bundle in lock-step → golden prompts → the file."""

from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter

from pagelet.exporter.certificate.budget import affordable_tokens
from pagelet.exporter.certificate.golden import place, replay_here
from pagelet.exporter.certificate.held_out import held_out
from pagelet.exporter.certificate.walk import Walk
from pagelet.exporter.checkpoint import Checkpoint
from pagelet.exporter.graph import CacheFormat
from pagelet.exporter.original import Original
from pagelet.exporter.part import Part
from pagelet.models.certificate import Certificate
from pagelet.plugins.native import kernel_arithmetic

OnStep = Callable[[int, int, str], None]


def certify(
    checkpoint: Checkpoint,
    bundle: Part,
    cache: CacheFormat,
    texts: Sequence[Sequence[int]],
    golden: Sequence[Sequence[int]],
    *,
    graph: Path,
    seconds: float,
    threads: int = 0,
    on_progress: OnStep,
) -> Certificate:
    """Compare a bundle with its original and write the certificate's files beside `graph`.

    The original runs in the checkpoint's own precision, computed in float32, with an f32 cache; one layer of
    each model is in memory at a time, and at most 4,096 tokens' residual streams.

    Args:
        texts: held-out token ids, of which as many are used as fit into `seconds`, but at least 128.
        golden: short texts that `verify` replays.
        on_progress: told (done, total, what comes next).

    Raises:
        CheckpointError: the original computes NaN or infinity; the layer where it begins is named.
        BundleError: the bundle does.
    """
    start = perf_counter()
    spec = bundle.spec
    total = spec.num_layers + 3
    prompts = place(golden, spec.max_context)
    context = 1 + max(max(prompt.position_ids) for prompt in prompts)
    on_progress(0, total, "measuring")
    longest = max(context, min(spec.max_context, 1024))
    with Original(checkpoint, spec, longest, bundle.folder) as original:
        extra = sum(len(prompt.token_ids) for prompt in prompts)
        budget = affordable_tokens(original, bundle, cache, seconds, extra, threads)
        pieces = held_out(texts, budget, spec.max_context)
        walk = Walk(pieces, prompts, cache, threads)
        errors, theirs, ours = walk.layers(
            original, bundle, lambda layer: on_progress(1 + layer, total, f"layers.{layer}")
        )
        on_progress(total - 2, total, "head")
        quality, reference = walk.head(original, bundle, theirs, ours)
    on_progress(total - 1, total, "golden prompts")
    prompts_as_run, rows = replay_here(prompts, reference, bundle, cache, graph, threads)
    used, given = sum(map(len, pieces)), sum(map(len, texts))
    certificate = Certificate(
        quality,
        tuple(errors),
        prompts_as_run,
        kernel_arithmetic(),
        rows,
        seconds=round(perf_counter() - start, 2),
        note=f"{used} of {given} tokens of held-out text, in {len(pieces)} windows",
    )
    certificate.save(graph.parent)
    on_progress(total, total, "")
    return certificate
