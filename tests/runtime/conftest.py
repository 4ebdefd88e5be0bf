"""Engines over a fake backend, with a real tokenizer: nothing of a model is needed."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from pagelet.models.manifest import TextSettings
from pagelet.models.text import Tokenizer
from pagelet.runtime import Engine, EngineConfig, SamplingParams

# The test modules of this folder share fake_backend.py.
sys.path.insert(0, str(Path(__file__).parent))

from fake_backend import FakeBackend
from scripted import Guess, ScriptedProposer

EOS = 1


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Byte-level without merges: 258 tokens, <bos> 0 and <eos> 1 first."""
    folder = tmp_path_factory.mktemp("tokenizer")
    names = ["<bos>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    built = tokenizers.Tokenizer(models.BPE({name: index for index, name in enumerate(names)}, []))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    built.add_special_tokens(["<bos>", "<eos>"])
    built.save(str(folder / "tokenizer.json"))
    return Tokenizer.open(folder, TextSettings(eos_token_ids=(EOS,)))


@pytest.fixture
def make_engine(tokenizer: Tokenizer) -> Iterator[Callable[..., tuple[Engine, FakeBackend]]]:
    """Builds engines over a FakeBackend, closed when the test ends.

    `backend` are the backend's keyword arguments, the others the config's.
    """
    engines: list[Engine] = []

    def make(backend: dict[str, Any] | None = None, **config: Any) -> tuple[Engine, FakeBackend]:
        fake = FakeBackend(**({"vocab_size": tokenizer.vocab_size} | (backend or {})))
        engines.append(Engine(fake, tokenizer, EngineConfig(**config)))
        return engines[-1], fake

    yield make
    for engine in engines:
        engine.close()
        engine._loop.blocks.check_integrity([])


@pytest.fixture
def saved(make_engine: Callable[..., tuple[Engine, FakeBackend]], tmp_path: Path) -> Path:
    """A session: a sampled request of 30 tokens, eight of them generated."""
    engine, _ = make_engine()
    asked = SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.7, stop=["zz"], seed=3)
    request = engine.submit([5 * index % 250 + 2 for index in range(22)], asked)
    request.result(timeout=10)
    engine.save_session(tmp_path / "saved", request)
    return tmp_path / "saved"


@pytest.fixture
def make_speculating(tokenizer: Tokenizer) -> Iterator[Callable[..., tuple[Engine, ScriptedProposer]]]:
    """Builds engines whose proposals a test says: a proposer, or a function (tokens, limit) -> tokens.

    `backend` is one, or the keyword arguments of a FakeBackend; the others are the config's.
    """
    engines: list[Engine] = []

    def make(
        guess: ScriptedProposer | Guess, backend: FakeBackend | dict[str, Any] | None = None, **config: Any
    ) -> tuple[Engine, ScriptedProposer]:
        if not isinstance(backend, FakeBackend):
            backend = FakeBackend(**({"vocab_size": tokenizer.vocab_size} | (backend or {})))
        proposer = guess if isinstance(guess, ScriptedProposer) else ScriptedProposer(guess)
        settings = EngineConfig(**({"num_draft_tokens": 4} | config))
        engines.append(Engine(backend, tokenizer, settings, proposers=[proposer]))
        return engines[-1], proposer

    yield make
    for engine in engines:
        engine.close()
        engine._loop.blocks.check_integrity([])
