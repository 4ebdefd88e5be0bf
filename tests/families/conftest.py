"""Tiny random checkpoints of every family."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from families.rows import Row, config_options

MakeFamily = Callable[[Row], tuple[Path, Any]]


@pytest.fixture
def make_family(tmp_path: Path, byte_tokenizer: Callable[[Path], None]) -> MakeFamily:
    """Writes a checkpoint as `save_pretrained` does; the folder, and transformers' own model of it."""

    def make(row: Row) -> tuple[Path, Any]:
        folder = tmp_path / "checkpoint"
        model = write_family(row, folder)
        byte_tokenizer(folder)
        return folder, model

    return make


def write_family(row: Row, folder: Path) -> Any:
    """The weights and their config; transformers' own model of them."""
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    config = getattr(transformers, f"{row.kind}Config")(**config_options(row))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        shake(name, parameter)
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.fill_(0.8)
    model.save_pretrained(folder)
    return model


def shake(name: str, parameter: torch.nn.Parameter) -> None:
    """As initialized, norms of one and biases of zero would hide a swapped norm or a lost bias."""
    with torch.no_grad():
        if "norm" in name or name.endswith((".ln_1.weight", ".ln_2.weight", ".ln_f.weight")):
            parameter.add_(0.3 * torch.randn_like(parameter))
        elif (
            name.endswith(("bias", "sinks"))
            or "experts" in name
            or "router" in name
            or name.endswith("mlp.gate.weight")
        ):
            torch.nn.init.normal_(parameter, 0.0, 0.3)
