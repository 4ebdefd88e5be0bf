"""The golden prompts of a bundle for a GPU, run on the device: what `verify` compares there."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from pagelet.models.certificate import Certificate, GoldenPrompt
from pagelet.models.manifest import Manifest
from pagelet.runtime.backends.base import Backend, Float32Array, StepBatch
from pagelet.runtime.backends.select import cache_shape, open_backend
from pagelet.runtime.config import EngineConfig


def replay_on_device(
    folder: Path, manifest: Manifest, certificate: Certificate
) -> Iterator[tuple[GoldenPrompt, Float32Array]]:
    """Each prompt with the logits of its recorded positions, float32 [positions, vocab].

    A prompt whose tokens do not stand one behind another is left out where the target counts positions
    itself (cuda).

    Raises:
        BackendError, BundleError, CapacityError: the bundle cannot be opened on this device.
    """
    prompts = [
        prompt
        for prompt in certificate.golden
        if manifest.target != "cuda" or prompt.position_ids == tuple(range(len(prompt.token_ids)))
    ]
    longest = max(len(prompt.token_ids) for prompt in prompts)
    shape = cache_shape(manifest, longest)
    layout = shape.layout(shape.sequence_bytes(longest), longest)
    most = max(prompt.positions for prompt in prompts)
    backend = open_backend(folder, manifest, layout, EngineConfig(), most)
    try:
        for prompt in prompts:
            yield prompt, _logits(backend, prompt)
    finally:
        backend.close()


def _logits(backend: Backend, prompt: GoldenPrompt) -> Float32Array:
    """From an empty cache, whose blocks it takes in order."""
    length = len(prompt.token_ids)
    blocks = np.arange(-(-length // backend.layout.block_size), dtype=np.int32)[None]
    batch = StepBatch(
        input_ids=np.array(prompt.token_ids, np.int64),
        position_ids=np.array(prompt.position_ids, np.int64),
        cumulative_sequence_length=np.array([0, length], np.int32),
        past_seqlens=np.zeros(1, np.int32),
        block_tables=(blocks,) * len(backend.layout.groups),
        logits_indices=np.arange(length - prompt.positions, length, dtype=np.int64),
    )
    logits: Float32Array = backend.run(batch).copy()
    return logits
