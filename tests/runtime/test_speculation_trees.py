"""Trees of candidates through the engine and the real op: the same text, whatever branches are verified."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from exporting import uncertified

from pagelet.exporter import export
from pagelet.runtime import Engine, EngineConfig, SamplingParams
from pagelet.runtime.opening import open_bundle
from pagelet.runtime.speculation.proposal import Candidate, Proposal, depths, is_chain, main_chain
from pagelet.runtime.speculation.proposer import Proposer
from pagelet.runtime.tasks import Generation

VOCAB = 320


class TreeProposer(Proposer):
    """Random trees of up to `size` candidates, in which the known text is hidden among wrong ones."""

    name = "trees"

    def __init__(self, texts: Sequence[Sequence[int]], size: int, seed: int) -> None:
        self._texts = [list(text) for text in texts]
        self._size = size
        self._choose = random.Random(seed)
        self.num_moved = 0
        self.num_accepted = 0

    def outlook(self, sequence: Generation, limit: int) -> Proposal:
        done = len(sequence.tokens)
        text = next(text for text in self._texts if text[:done] == sequence.tokens)
        tree: list[Candidate] = []
        known = [-1]  # the candidates that are the known text so far
        for _ in range(min(self._size, limit)):
            if self._choose.random() < 0.5 and len(known) - 1 + done < len(text):
                tree.append(Candidate(text[done + len(known) - 1], known[-1], 0.9))
                known.append(len(tree) - 1)
            else:
                parent = self._choose.randrange(-1, len(tree))
                tree.append(Candidate(self._choose.randrange(VOCAB), parent, 0.9))
        return tree if max(depths(tree), default=0) < limit else tree[:1]

    def seconds(self, lengths: Sequence[int]) -> float:
        return 0.0

    def fill(self, proposals: Sequence[tuple[Generation, Proposal]]) -> list[Proposal]:
        return [proposal for _, proposal in proposals]

    def observe(self, sequence: Generation, proposal: Proposal, accepted: Sequence[int]) -> None:
        self.num_accepted += len(accepted)
        self.num_moved += sum(place != index for place, index in enumerate(accepted))

    def forget(self, sequence: Generation) -> None:
        pass


@pytest.fixture(scope="module")
def checkpoints(make_llama: Callable[..., Path], make_windowed: Callable[[int], Path]) -> dict[str, Path]:
    return {"llama": make_llama(), "windowed": make_windowed(40)}


def tokens_of(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> list[tuple[int, ...]]:
    done = [completion.token_ids for completion in engine.generate_all(prompts, params)]
    engine.check_integrity()
    return done


@pytest.mark.parametrize("model", ["llama", "windowed"])
@pytest.mark.parametrize("cache_type", ["f32", "f16", "int8", "fp8"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_text_is_that_of_plain_decoding(
    checkpoints: dict[str, Path], model: str, cache_type: str, temperature: float, tmp_path: Path
) -> None:
    bundle = tmp_path / "b"
    export(checkpoints[model], bundle, uncertified(weights="int4", cache_type=cache_type, block_size=8))
    draw = random.Random(9)
    prompts = [[draw.randrange(2, 258) for _ in range(length)] for length in (1, 7, 30, 100, 250)]
    params = SamplingParams(max_tokens=40, ignore_eos=True, temperature=temperature, seed=5)
    config = EngineConfig(kv_memory="8MiB", threads=2, prefix_cache=False, speculate="off")
    with Engine.open(bundle, config) as engine:
        plain = tokens_of(engine, prompts, params)
    texts = [prompt + list(reply) for prompt, reply in zip(prompts, plain, strict=True)]
    for size in (3, 12, 30):
        opened = open_bundle(bundle, config, False, None)
        proposer = TreeProposer(texts, size, seed=size)
        fixed = EngineConfig(num_draft_tokens=size, max_sequences=3, max_step_tokens=128)
        with Engine(opened.backend, opened.tokenizer, fixed, proposers=[proposer]) as engine:
            assert tokens_of(engine, prompts, params) == plain
            assert engine.stats().speculation_failure is None
        assert proposer.num_accepted > 0
        assert proposer.num_moved > 0, "no accepted candidate had to be moved behind the one before it"


def test_shapes_of_proposals() -> None:
    def candidates(*parents: int) -> list[Candidate]:
        return [Candidate(10 + index, parent, 0.5) for index, parent in enumerate(parents)]

    assert is_chain(candidates(-1, 0, 1))
    assert is_chain([])
    assert not is_chain(candidates(-1, -1))
    assert depths(candidates(-1, -1, 1, 0, 2)) == [0, 0, 1, 1, 2]
    chain = main_chain(candidates(-1, -1, 1, 0, 3))
    assert [candidate.token_id for candidate in chain] == [10, 13, 14]
    assert is_chain(chain)
