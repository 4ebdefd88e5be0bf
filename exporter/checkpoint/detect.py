"""Which kind of checkpoint a path is."""

from pathlib import Path

from pagelet.exporter.checkpoint.adapter import open_adapted
from pagelet.exporter.checkpoint.base import Checkpoint
from pagelet.exporter.checkpoint.gguf_file import open_gguf
from pagelet.exporter.checkpoint.huggingface import INDEX_FILE, SINGLE_FILE, open_huggingface
from pagelet.models.errors import CheckpointError

_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_NEVER_UNPICKLED = (
    "pickled weights can run code when they are loaded, so they are never unpickled. "
    "Convert them to safetensors first (in transformers: model.save_pretrained(folder))."
)


def open_checkpoint(path: Path, adapter: Path | None = None) -> Checkpoint:
    """Open a folder with config.json and safetensors files, or a GGUF file.

    `adapter`: a folder with a LoRA as PEFT writes it, to be merged into the weights.

    Raises:
        CheckpointError: nothing there, pickled weights, or a damaged or incomplete checkpoint or adapter.
        UnsupportedError: a well-formed one of a kind that is not known.
    """
    base = _open(path)
    return base if adapter is None else open_adapted(base, adapter)


def _open(path: Path) -> Checkpoint:
    if path.is_dir():
        _check_folder(path)
        return open_huggingface(path)
    if not path.exists():
        raise CheckpointError(f"{path} does not exist; give a folder with config.json or a .gguf file.")
    if path.suffix.lower() in _PICKLED:
        raise CheckpointError(f"{path}: {_NEVER_UNPICKLED}")
    if path.suffix.lower() == ".safetensors":
        raise CheckpointError(f"{path} is one weight file; give its folder, which must hold config.json too.")
    if not path.is_file():
        raise CheckpointError(f"{path} is neither a folder nor a plain file.")
    return open_gguf(path)


def _check_folder(folder: Path) -> None:
    names = sorted(entry.name for entry in folder.iterdir())
    if not names:
        raise CheckpointError(f"{folder} is empty; expected config.json and safetensors files.")
    has_weights = INDEX_FILE in names or any(name.endswith(".safetensors") for name in names)
    pickled = [name for name in names if name.lower().endswith(_PICKLED)]
    if pickled and not has_weights:
        raise CheckpointError(f"{folder} holds only {pickled[0]}: {_NEVER_UNPICKLED}")
    gguf = [name for name in names if name.lower().endswith(".gguf")]
    if gguf and not has_weights:
        raise CheckpointError(
            f"{folder} holds GGUF files; give one of them as the source, e.g. {folder / gguf[0]}."
        )
    if not has_weights:
        raise CheckpointError(
            f"{folder} has no weights; expected {SINGLE_FILE}, or {INDEX_FILE} and its shards."
        )
    if "config.json" not in names:
        raise CheckpointError(
            f"{folder} has no config.json; it says which model the weights are. Download it too."
        )
