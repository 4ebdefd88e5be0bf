"""The draft: which pairs are refused, whose memory it takes, and what becomes of it when it fails."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from exporting import uncertified
from fake_backend import FakeBackend, greedy
from test_engine_threads import Gate, eventually

from pagelet.exporter import export
from pagelet.models.errors import BackendError, BundleError, CapacityError, InputError
from pagelet.models.manifest import load_manifest
from pagelet.models.text import Tokenizer
from pagelet.runtime import Engine, EngineConfig, SamplingParams
from pagelet.runtime.block_manager import BlockManager
from pagelet.runtime.speculation.draft import DraftProposer, _Writer
from pagelet.runtime.speculation.pairing import check_pair
from pagelet.runtime.tasks import Generation

VOCAB = 258
MakeDrafting = Callable[..., tuple[Engine, DraftProposer]]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(2, 200, length).tolist()
    return tokens


def params(max_tokens: int = 20, **others: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **others)


# A target and a draft that are the same FakeBackend, so that all that is read right is accepted.


@pytest.fixture
def make_drafting(tokenizer: Tokenizer) -> Iterator[MakeDrafting]:
    """Builds engines with a draft; `draft` and `target` are the backends' keyword arguments."""
    engines: list[Engine] = []

    def make(
        draft: dict[str, Any] | None = None, target: dict[str, Any] | None = None, **config: Any
    ) -> tuple[Engine, DraftProposer]:
        settings = EngineConfig(**({"num_draft_tokens": 4} | config))
        proposer = DraftProposer(
            FakeBackend(**({"vocab_size": VOCAB} | (draft or {}))),
            vocab_size=VOCAB,
            context=128,
            max_sequences=settings.max_sequences,
            max_step_tokens=settings.max_step_tokens,
            prefix_cache=settings.prefix_cache,
        )
        backend = FakeBackend(**({"vocab_size": VOCAB} | (target or {})))
        engines.append(Engine(backend, tokenizer, settings, proposers=[proposer]))
        return engines[-1], proposer

    yield make
    for engine in engines:
        engine.close()


def fake(proposer: DraftProposer) -> FakeBackend:
    assert isinstance(proposer.backend, FakeBackend)
    return proposer.backend


@pytest.mark.parametrize("max_sequences", [1, 8])
def test_what_it_reads_right_is_accepted(make_drafting: MakeDrafting, max_sequences: int) -> None:
    engine, proposer = make_drafting(max_sequences=max_sequences)
    prompts = [prompt_of(length, length) for length in (1, 6, 33)]
    for prompt, done in zip(prompts, engine.generate_all(prompts, params()), strict=True):
        assert list(done.token_ids) == greedy(prompt, 20, VOCAB)
        assert done.usage.accepted_tokens == done.usage.drafted_tokens > 0
    engine.check_integrity()
    assert proposer.blocks.num_used == 0


def test_it_draws_with_the_targets_noise_and_penalties(make_drafting: MakeDrafting) -> None:
    engine, _ = make_drafting(target={"num_blocks": 200}, draft={"num_blocks": 200})
    done = engine.generate(prompt_of(9), params(temperature=0.9, top_p=0.9, seed=4, n=3))
    assert done.usage.accepted_tokens == done.usage.drafted_tokens > 0
    engine.check_integrity()


def test_a_smaller_vocabulary(make_drafting: MakeDrafting) -> None:
    """Where the text has a token that the draft does not know, it has nothing to say."""
    engine, proposer = make_drafting({"vocab_size": 200})
    for seed in range(4):
        prompt = prompt_of(8, seed)
        done = engine.generate(prompt, params())
        assert list(done.token_ids) == greedy(prompt, 20, VOCAB)
        assert any(token >= 200 for token in done.token_ids)
    assert engine.stats().drafted_tokens > 0
    assert engine.stats().speculation_failure is None
    engine.check_integrity()
    assert proposer.blocks.num_used == 0


def test_long_prompts_are_caught_up_in_pieces(make_drafting: MakeDrafting) -> None:
    engine, proposer = make_drafting(max_step_tokens=16, max_sequences=4)
    assert list(engine.generate(prompt_of(70), params()).token_ids) == greedy(prompt_of(70), 20, VOCAB)
    assert max(map(sum, fake(proposer).batches)) <= 16
    assert engine.stats().accepted_tokens > 0
    engine.check_integrity()


def test_prefixes_are_found_again(make_drafting: MakeDrafting) -> None:
    engine, proposer = make_drafting()
    read = []
    for _ in range(2):
        before = sum(map(sum, fake(proposer).batches))
        assert list(engine.generate(prompt_of(60), params(6)).token_ids) == greedy(prompt_of(60), 6, VOCAB)
        read.append(sum(map(sum, fake(proposer).batches)) - before)
    assert read[0] >= 60
    assert read[1] <= read[0] - 56, "it read the prompt again"
    engine.generate(prompt_of(60), params(6), cache_salt="another's")
    assert sum(map(sum, fake(proposer).batches)) - sum(read) >= 60, "found under another salt"
    engine.check_integrity()


def test_few_blocks_of_the_draft_cost_nobody_the_text(make_drafting: MakeDrafting) -> None:
    engine, proposer = make_drafting({"num_blocks": 9}, {"num_blocks": 64})
    prompts = [prompt_of(14, seed) for seed in range(5)]
    for prompt, done in zip(prompts, engine.generate_all(prompts, params(30)), strict=True):
        assert list(done.token_ids) == greedy(prompt, 30, VOCAB)
    stats = engine.stats()
    assert (stats.preemptions, stats.speculation_failure) == (0, None)
    assert stats.drafted_tokens > 0
    engine.check_integrity()
    assert proposer.blocks.num_used == 0


def test_who_is_preempted_leaves_the_draft_too(make_drafting: MakeDrafting) -> None:
    engine, proposer = make_drafting(target={"num_blocks": 14}, max_sequences=6)
    prompts = [prompt_of(9 + index, index) for index in range(6)]
    for prompt, done in zip(prompts, engine.generate_all(prompts, params(30)), strict=True):
        assert list(done.token_ids) == greedy(prompt, 30, VOCAB)
    assert engine.stats().preemptions > 0
    engine.check_integrity()
    assert proposer.blocks.num_used == 0
    assert not proposer._writers


def test_a_cancelled_requests_blocks_are_freed(make_drafting: MakeDrafting) -> None:
    gate = Gate()
    engine, proposer = make_drafting(target={"before_run": gate})
    request = engine.submit(prompt_of(9), params(90))
    gate.let(4)
    assert proposer.blocks.num_used > 0
    request.cancel()
    gate.open()
    assert request.result(timeout=10).finish_reason == "cancelled"
    eventually(lambda: proposer.blocks.num_used == 0)
    engine.check_integrity()


@pytest.mark.parametrize("calls", [0, 1, 5, 12])
def test_a_draft_that_fails_leaves_the_text_alone(make_drafting: MakeDrafting, calls: int) -> None:
    left = [calls]

    def before_run(batch: object) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise BackendError("the draft broke")

    engine, proposer = make_drafting({"before_run": before_run})
    prompts = [prompt_of(9, seed) for seed in range(3)]
    for prompt, done in zip(prompts, engine.generate_all(prompts, params()), strict=True):
        assert list(done.token_ids) == greedy(prompt, 20, VOCAB)
    stats = engine.stats()
    assert stats.speculation_failure == "draft: the draft broke"
    assert stats.failed_steps == 0
    assert fake(proposer).closed
    engine.check_integrity()
    assert engine.generate(prompt_of(5), params()).usage.drafted_tokens == 0


def test_logits_that_are_no_numbers_are_not_drawn_from(
    make_drafting: MakeDrafting, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, proposer = make_drafting()
    run = FakeBackend.run
    monkeypatch.setattr(
        proposer.backend, "run", lambda batch: run(fake(proposer), batch) * np.float32(np.nan)
    )
    done = engine.generate(prompt_of(9), params())
    assert list(done.token_ids) == greedy(prompt_of(9), 20, VOCAB)
    assert done.usage.drafted_tokens == 0
    assert engine.stats().speculation_failure is None


# Pairs of bundles


@pytest.fixture(scope="module")
def target(make_llama: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported(make_llama(), tmp_path_factory.mktemp("pair") / "target")


@pytest.fixture(scope="module")
def draft(make_llama: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported(make_llama(seed=1, num_hidden_layers=1), tmp_path_factory.mktemp("pair") / "draft")


def exported(checkpoint: Path, bundle: Path, **options: Any) -> Path:
    export(checkpoint, bundle, uncertified(**({"block_size": 16} | options)))
    return bundle


def with_tokenizer(bundle: Path, folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """The bundle's manifest and a changed tokenizer, for `check_pair`."""
    document = json.loads((bundle / "tokenizer.json").read_text(encoding="utf-8"))
    change(document)
    (folder / "tokenizer.json").write_text(json.dumps(document), encoding="utf-8")
    return folder


def swap_two(document: dict[str, Any]) -> None:
    vocab = document["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]


CHANGES: dict[str, Callable[[dict[str, Any]], None]] = {
    "the vocabularies": swap_two,
    "the merges": lambda document: document["model"]["merges"].append(["a", "b"]),
    "the special tokens": lambda document: document["added_tokens"][0].update(special=False),
}


@pytest.mark.parametrize("what", CHANGES)
def test_another_tokenizer_is_refused(target: Path, tmp_path: Path, what: str) -> None:
    manifest = load_manifest(target)
    other = with_tokenizer(target, tmp_path, CHANGES[what])
    with pytest.raises(InputError, match=f"another tokenizer: {what} of"):
        check_pair(target, manifest, other, manifest, 512)


def test_the_same_tokenizer_written_otherwise_is_fine(target: Path, tmp_path: Path) -> None:
    manifest = load_manifest(target)
    other = with_tokenizer(target, tmp_path, lambda document: None)
    assert (other / "tokenizer.json").read_bytes() != (target / "tokenizer.json").read_bytes()
    check_pair(target, manifest, other, manifest, 512)


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"model": 3, "added_tokens": []}', '{"model": {}}', "\xff"]
)
def test_a_damaged_tokenizer_is_named(target: Path, tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(BundleError, match="cannot be compared"):
        check_pair(target, load_manifest(target), tmp_path, load_manifest(target), 512)


def test_a_larger_vocabulary_is_refused(
    make_llama: Callable[..., Path], target: Path, tmp_path: Path
) -> None:
    larger = exported(make_llama(vocab_size=352), tmp_path / "larger")
    with pytest.raises(InputError, match=r"has 352 tokens, .* only 320"):
        Engine.open(target, EngineConfig(draft=larger))


def test_a_shorter_context_is_refused_unless_the_engines_is_as_short(
    make_llama: Callable[..., Path], target: Path, tmp_path: Path
) -> None:
    short = exported(make_llama(max_position_embeddings=128), tmp_path / "short")
    with pytest.raises(
        InputError, match="context of 128 tokens, the engine one of 512; set max_context to 128"
    ):
        Engine.open(target, EngineConfig(draft=short))
    with Engine.open(target, EngineConfig(draft=short, max_context=128, kv_memory="4MiB")) as engine:
        assert len(engine.generate([5, 6], params(8)).token_ids) == 8


def test_a_bundle_for_another_target_is_refused(target: Path, tmp_path: Path) -> None:
    manifest = load_manifest(target)
    foreign = replace(manifest, target="cuda")
    with pytest.raises(InputError, match=r"for the target 'cuda', .* for 'cpu'"):
        check_pair(target, manifest, target, foreign, 512)


def test_both_caches_fit_into_the_budget(target: Path, draft: Path) -> None:
    for kv_memory in (200_000, 1 << 20, 3_333_333):
        with Engine.open(target, EngineConfig(draft=draft, kv_memory=kv_memory)) as engine:
            guards = engine._loop.speculator._proposers
            (proposer,) = (g._proposer for g in guards if isinstance(g._proposer, DraftProposer))
            layouts = engine._loop.backend.layout, proposer.backend.layout
            assert kv_memory * 0.9 < sum(layout.num_bytes for layout in layouts) <= kv_memory
            # As many tokens in both, up to a block that one of them has more.
            assert abs(layouts[0].num_blocks - layouts[1].num_blocks) <= 1
            assert len(engine.generate([5, 6, 7], params(12)).token_ids) == 12
            engine.check_integrity()


@pytest.mark.parametrize("block_size", [4, 16, 64])
def test_a_budget_of_a_block_each_is_the_least(
    make_llama: Callable[..., Path], target: Path, tmp_path: Path, block_size: int
) -> None:
    other = exported(make_llama(seed=1, num_hidden_layers=1), tmp_path / "draft", block_size=block_size)
    # Bytes of an f16 cache: keys and values, layers, KV heads, head size.
    blocks = [2 * 2 * layers * 2 * 16 * size for layers, size in ((2, 16), (1, block_size))]
    with pytest.raises(CapacityError, match=f"{blocks[0]} and {blocks[1]}. Raise kv_memory"):
        Engine.open(target, EngineConfig(draft=other, kv_memory=sum(blocks) - 1))
    with Engine.open(target, EngineConfig(draft=other, kv_memory=sum(blocks))) as engine:
        assert engine.stats().blocks_total == 1
        assert len(engine.generate([5, 6], params(8)).token_ids) == 8


def test_refused_guesses_are_taken_back() -> None:
    """The draft goes on from the target's text, not from what it had guessed."""
    blocks = BlockManager(FakeBackend().layout, 128)
    request = SimpleNamespace(options=SimpleNamespace(cache_salt=None, prefix_cache=False))
    sequence = cast(Generation, SimpleNamespace(tokens=[5, 6, 7, 8, 9], request=request))
    writer = _Writer(blocks, sequence)
    assert writer.cache.append(5)
    for guess in (1, 2, 3):
        writer.tokens.append(guess)
        assert writer.cache.append(1)
    writer.catch_up([5, 6, 7, 8, 9, 1, 4])  # the first was right, 4 came instead of 2
    assert writer.tokens == [5, 6, 7, 8, 9, 1, 4]
    assert writer.cache.length == writer.cache.committed == 6
    writer.catch_up([5, 6, 7, 8, 9, 1, 4, 0])
    assert writer.num_unread == 2
    writer.cache.free()
    blocks.check_integrity([])
