"""The published SmolLM2-135M-Instruct, start to end: its numbers are transformers', its batches its own."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from pagelet.runtime import Engine, EngineConfig, SamplingParams

pytestmark = pytest.mark.slow

TEXT = (Path(__file__).parent / "data" / "tides.txt").read_text(encoding="utf-8")
QUESTIONS = [
    "Why is the sky blue?",
    "Write two sentences about the sea.",
    "What is 12345 plus 1?",
    "Name three rivers in Europe and one in Asia.",
    "Explain to a child what a computer does.",
]


@pytest.fixture(scope="module")
def model(smollm2_gguf: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name)


@pytest.fixture(scope="module")
def fp32(smollm2_fp32: Path) -> Iterator[Engine]:
    with Engine.open(smollm2_fp32, EngineConfig(kv_memory="512MiB")) as engine:
        yield engine


@pytest.fixture(scope="module")
def int4(smollm2_int4: Path) -> Iterator[Engine]:
    with Engine.open(smollm2_int4, EngineConfig(kv_memory="512MiB")) as engine:
        yield engine


def ask(engine: Engine, question: str) -> list[int]:
    return engine.tokenizer.encode_chat([{"role": "user", "content": question}])


def test_digits_are_split_one_by_one(int4: Engine) -> None:
    assert len(int4.tokenizer.encode("12345")) == 5


def test_fp32_logits_equal_transformers(model: Any, fp32: Engine) -> None:
    ids = fp32.tokenizer.encode(TEXT)[:256]
    assert len(ids) == 256
    with torch.no_grad():
        expected = np.asarray(model(torch.tensor([ids])).logits[0])
    # 30 layers of float32 sums in another order; the logits reach 30.
    assert np.abs(fp32.logits(ids) - expected).max() <= 2e-3


@pytest.mark.parametrize("question", QUESTIONS)
def test_fp32_greedy_tokens_equal_transformers(model: Any, fp32: Engine, question: str) -> None:
    ids = ask(fp32, question)
    ours = fp32.generate(ids, SamplingParams(max_tokens=64, ignore_eos=True)).token_ids
    model.generation_config.eos_token_id = None
    theirs = model.generate(torch.tensor([ids]), max_new_tokens=64, do_sample=False, pad_token_id=0)
    assert list(ours) == theirs[0, len(ids) :].tolist()


def test_int4_is_close_to_fp32(fp32: Engine, int4: Engine) -> None:
    from pagelet.tools.evaluate import evaluate, windows

    result = evaluate(int4, list(windows(int4.tokenizer.encode(TEXT), 512)), fp32)
    # Measured 0.01: the layers pass through exactly, the table is rounded once. Gibberish is above 1.
    assert result.mean_kl is not None
    assert result.mean_kl < 0.05


def test_int4_answers_in_english(int4: Engine) -> None:
    text = int4.generate(ask(int4, QUESTIONS[0]), SamplingParams(max_tokens=60)).text
    assert "light" in text
    assert "sky" in text


FIFTY_REQUESTS = """
import ctypes, json, sys
from pagelet.runtime import Engine, EngineConfig, SamplingParams
from pagelet.tools.memory import anonymous_rss

def held():
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)  # free pages of the heap do not count
    return anonymous_rss()

params = SamplingParams(max_tokens=100, ignore_eos=True, temperature=0)
# Without guesses: the widest step that verifies some may come late, and has the largest activations.
with Engine.open(sys.argv[1], EngineConfig(kv_memory="8MiB", speculate="off")) as engine:
    for done in range(50):
        question = f"{sys.argv[2 + done % 5]} ({done})"
        prompt = engine.tokenizer.encode_chat([{"role": "user", "content": question}])
        assert len(engine.generate(prompt, params).token_ids) == 100
        if done == 4:
            after_500 = held()
    grown, stats = held() - after_500, engine.stats()
print(json.dumps({"grown": grown, "blocks_used": stats.blocks_used, "kv_bytes": stats.kv_bytes}))
"""

PROMPT_LENGTHS = [1, 2, 3, 5, 8, 13, 31, 32, 33, 64, 65, 90, 129, 200, 257, 300]


def batch_prompts(engine: Engine) -> list[list[int]]:
    ids = engine.tokenizer.encode(TEXT)
    return [ids[7 * index : 7 * index + length] for index, length in enumerate(PROMPT_LENGTHS)]


@pytest.mark.parametrize("params", [
    SamplingParams(max_tokens=24, ignore_eos=True),
    SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.9, top_p=0.95, seed=7),
], ids=["greedy", "seeded"])  # fmt: skip
@pytest.mark.parametrize("weights", ["fp32", "int4"])
def test_sixteen_sequences_at_once_give_what_each_gives_alone(
    weights: str, params: SamplingParams, request: pytest.FixtureRequest
) -> None:
    engine: Engine = request.getfixturevalue(weights)
    prompts = batch_prompts(engine)
    alone = [engine.generate(prompt, params).token_ids for prompt in prompts]
    together = [completion.token_ids for completion in engine.generate_all(prompts, params)]
    assert together == alone


@pytest.mark.parametrize("weights", ["smollm2_fp32", "smollm2_int4"])
def test_logits_are_equal_to_the_bit_in_batches_and_chunks(
    weights: str, request: pytest.FixtureRequest
) -> None:
    """Through the backend itself: sixteen sequences in one step, against each alone, whole or in pieces."""
    bundle: Path = request.getfixturevalue(weights)
    from pagelet.tools.invariance import Stepper

    with Stepper(bundle, num_blocks=160, max_rows=2000) as stepper:
        ids = stepper.tokenizer.encode(TEXT)
        prompts = [ids[7 * i : 7 * i + length] for i, length in enumerate(PROMPT_LENGTHS)]
        together = stepper.logits_of(prompts)
        for prompt, expected in zip(prompts, together, strict=True):
            for cuts in ([], [1], [len(prompt) // 2], list(range(1, len(prompt), 50))):
                assert np.array_equal(stepper.logits_in_pieces(prompt, cuts), expected), (len(prompt), cuts)


def test_memory_stays_flat_over_fifty_requests(smollm2_int4: Path) -> None:
    """5,000 tokens as 50 requests of 100; the pool is so small that the first five touch all of it."""
    # In a process of its own: the heap that other tests leave behind moves by megabytes.
    command = [sys.executable, "-c", FIFTY_REQUESTS, str(smollm2_int4), *QUESTIONS]
    found = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    assert found["grown"] < 1 << 20
    assert found["blocks_used"] == 0
    assert found["kv_bytes"] <= 8 << 20
