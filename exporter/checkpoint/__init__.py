"""Reading checkpoints as streams: a folder with safetensors files, or a GGUF file."""

from pagelet.exporter.checkpoint.base import Blocks, Checkpoint
from pagelet.exporter.checkpoint.detect import open_checkpoint
from pagelet.exporter.checkpoint.tensor_info import TensorInfo

__all__ = ["Blocks", "Checkpoint", "TensorInfo", "open_checkpoint"]
