"""Who is measured: a row per engine and model form, and how its model file is made."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class Entrant:
    """An engine with its model, ready to be opened.

    Attributes:
        engine: the worker's name for it.
        many: whether it can serve several sequences at once.
    """

    name: str
    engine: str
    model: Path
    python: Path
    version: str
    many: bool = True

    @property
    def is_ours(self) -> bool:
        return self.engine == "pagelet"


@dataclass(frozen=True)
class Peer:
    """A form of the model for another engine.

    Attributes:
        package: whose presence in the peers' Python decides whether this one is measured.
        step: of `convert.py`; None: the source is taken as it is.
        source: what the step starts from: the GGUF, or the checkpoint as a Hugging Face folder.
        file: the part of what the step makes that the engine opens; "" is the whole folder.
    """

    name: str
    engine: str
    package: str
    step: str | None
    source: Literal["gguf", "checkpoint"]
    file: str = ""
    many: bool = True


PEERS = (
    Peer("llama.cpp Q4_0", "llama_cpp", "llama-cpp-python", "llama_cpp", "gguf", "q4_0.gguf"),
    Peer("llama.cpp, GGUF as it is", "llama_cpp", "llama-cpp-python", None, "gguf"),
    Peer("OpenVINO INT4, group 64 symmetric", "openvino", "openvino-genai", "openvino", "checkpoint"),
    Peer("OpenVINO, from the GGUF", "openvino", "openvino-genai", "openvino_gguf", "gguf"),
    Peer(
        "onnxruntime-genai INT4, group 32",
        "onnxruntime_genai",
        "onnxruntime-genai",
        "onnxruntime_genai",
        "checkpoint",
    ),
    Peer("transformers float32", "transformers", "transformers", None, "checkpoint", many=False),
)
