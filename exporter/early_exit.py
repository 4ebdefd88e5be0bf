"""Early exits: the first layers of a model as a bundle of their own, to guess ahead of the whole.

A model that was trained for it says much the same from an inner layer (LayerSkip, Elhoushi et al. 2024),
either through its own last norm and head, or through ones trained for that layer. A checkpoint may hold such
an exit after its layer N, counted from 1, in two tensors:

    early_exit.N.norm.weight    [hidden]         in the place of the last norm
    early_exit.N.head.weight    [vocab, hidden]  in the place of the head; optional
"""

from collections.abc import Mapping
from dataclasses import replace

from pagelet.exporter.checkpoint import Checkpoint
from pagelet.exporter.checkpoint.tensor_info import TensorInfo
from pagelet.models.errors import CheckpointError, InputError
from pagelet.models.spec import ModelSpec


def exit_after(checkpoint: Checkpoint, spec: ModelSpec, num_layers: int) -> ModelSpec:
    """The spec of the first `num_layers`; the checkpoint then gives the exit's norm and head, if it has them.

    Raises:
        InputError: as many layers as the model has, or more; or a model that cannot be cut.
        CheckpointError: an exit's tensor of the wrong shape.
    """
    if num_layers >= spec.num_layers:
        raise InputError(
            f"layers is {num_layers}; the model has {spec.num_layers}, expected 1 to {spec.num_layers - 1}."
        )
    if spec.layer_inputs:
        raise InputError(
            "this model's layers have inputs of their own, made for all of them: it has no exit."
        )
    norm = _exit_tensor(checkpoint.tensors, f"early_exit.{num_layers}.norm.weight", (spec.hidden_size,))
    if norm:
        checkpoint.use("final_norm.weight", norm)
    shape = (spec.vocab_size, spec.hidden_size)
    head = _exit_tensor(checkpoint.tensors, f"early_exit.{num_layers}.head.weight", shape)
    if head:
        checkpoint.use("head.weight", head)
        spec = replace(spec, tie_embeddings=False)
    return replace(spec, layers=spec.layers[:num_layers])


def _exit_tensor(tensors: Mapping[str, TensorInfo], name: str, shape: tuple[int, ...]) -> TensorInfo | None:
    info = tensors.get(name)
    if info is not None and info.shape != shape:
        raise CheckpointError(f"{name} has shape {list(info.shape)}, expected {list(shape)}.")
    return info
