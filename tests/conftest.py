"""Real models for the tests: SmolLM2 as it is published, and tiny random Llamas with every option."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as a shell starts what runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)  # children inherit what is ignored
os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: its models come from local folders
sys.path.insert(0, str(Path(__file__).parent))  # modules that the tests of several folders share

from exporting import uncertified

from pagelet.exporter import export
from pagelet.tools.download import SMOLLM2, fetch

MakeCheckpoint = Callable[..., Path]


@pytest.fixture(scope="session", autouse=True)
def kernels_are_kept_apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What exports compile is remembered for this run, and not among the user's own files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct, Q4_1 in a GGUF file; downloaded once into downloads/."""
    return fetch(SMOLLM2)


@pytest.fixture(scope="session")
def smollm2_fp32(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fp32 bundle of SmolLM2, cache included: transformers' numbers are its oracle."""
    bundle = tmp_path_factory.mktemp("smollm2") / "fp32"
    export(smollm2_gguf, bundle, uncertified(weights="fp32", cache_type="f32"))
    return bundle


@pytest.fixture(scope="session")
def smollm2_int4(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default bundle of SmolLM2: int4, groups of 32 with a minimum."""
    bundle = tmp_path_factory.mktemp("smollm2") / "int4"
    export(smollm2_gguf, bundle, uncertified())
    return bundle


@pytest.fixture(scope="session")
def make_llama(tmp_path_factory: pytest.TempPathFactory) -> MakeCheckpoint:
    """Writes a tiny random Llama checkpoint; keyword arguments go to its LlamaConfig."""
    return lambda **options: write_tiny_llama(tmp_path_factory.mktemp("llama"), **options)


@pytest.fixture(scope="session")
def make_windowed(tmp_path_factory: pytest.TempPathFactory) -> MakeCheckpoint:
    """Writes a tiny random Ministral of which every second layer has a window of so many tokens."""
    return lambda window: write_tiny_ministral(tmp_path_factory.mktemp("windowed"), window)


@pytest.fixture(scope="session")
def byte_tokenizer() -> Callable[[Path], None]:
    """Writes a tokenizer.json that encodes any text, byte by byte."""
    return write_byte_tokenizer


def write_tiny_llama(folder: Path, *, seed: int = 0, dtype: str = "float32", **options: Any) -> Path:
    """A random Llama with a byte-level tokenizer, as `save_pretrained` writes it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()

    defaults: dict[str, Any] = {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**(defaults | options)))
    for name, parameter in model.named_parameters():
        if name.endswith(
            ("norm.weight", ".bias")
        ):  # as initialized they would hide a swapped norm or a lost bias
            torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.3)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    write_byte_tokenizer(folder)
    return folder


def write_tiny_ministral(folder: Path, window: int) -> Path:
    import torch
    from transformers import MinistralConfig, MinistralForCausalLM

    torch.manual_seed(3)
    config = MinistralConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        initializer_range=0.3,
        sliding_window=window,
        layer_types=["sliding_attention", "full_attention"] * 2,
        bos_token_id=0,
        eos_token_id=1,
    )
    MinistralForCausalLM(config).save_pretrained(folder)
    write_byte_tokenizer(folder)
    return folder


def write_byte_tokenizer(folder: Path) -> None:
    """A byte-level BPE without merges: any text encodes, and no file has to be downloaded."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = ["<bos>", "<eos>"]
    tokenizer = Tokenizer(models.BPE({t: i for i, t in enumerate([*specials, *alphabet])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(specials)
    tokenizer.save(str(folder / "tokenizer.json"))
