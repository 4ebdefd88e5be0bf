"""Small tokenizers of the three kinds in use, built here: nothing is downloaded."""

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from pagelet.models.manifest import TextSettings
from pagelet.models.text import Tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog.  Why is the sky blue? def f(x):\n    return x + 1\n\n",
    "user assistant system <|im_start|> im_end <s> </s> [INST] end_of_turn, café naïve — 你好 😀👍",
] * 3
CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LLAMA2 = ["<unk>", "<s>", "</s>"]


def byte_level(specials: list[str] = CHATML) -> tokenizers.Tokenizer:
    """Byte-level BPE (GPT-2's kind) with 300 merges; its emojis take several tokens."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text.replace("😀", "").replace("👍", "") for text in CORPUS], trainer)
    return tokenizer


def sentencepiece_bpe(specials: list[str] = LLAMA2) -> tokenizers.Tokenizer:
    """BPE with byte tokens (Llama 2's kind): spaces are "▁", and one before each text is dropped again."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.BpeTrainer(vocab_size=60, show_progress=False)
    trained.train_from_iterator(["the fox user say hello end"], trainer)
    learned = json.loads(trained.to_str())["model"]
    names = [*specials, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *learned["vocab"]]
    vocab = {name: index for index, name in enumerate(dict.fromkeys(names))}
    merges = [tuple(pair) for pair in learned["merges"]]
    model = models.BPE(vocab, merges, unk_token=specials[0], fuse_unk=True, byte_fallback=True)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in specials])
    return tokenizer


def unigram(specials: list[str] = LLAMA2) -> tokenizers.Tokenizer:
    """Unigram with a Metaspace (T5's kind), whose model lists the special tokens too."""
    words = ["▁", "▁the", "▁fox", "fox", "▁a", "x", "▁x", "er", "▁us", "you", "<", ">", "/", "s", "|", "\n"]
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1) if chr(code) not in words]
    scored = [(name, 0.0) for name in specials]
    scored += [(word, -2.0 - rank / 10) for rank, word in enumerate([*words, *letters])]
    tokenizer = tokenizers.Tokenizer(models.Unigram(scored, unk_id=0, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in specials])
    return tokenizer


KINDS = {"byte_level": byte_level, "sentencepiece_bpe": sentencepiece_bpe, "unigram": unigram}


def opened(
    folder: Path, built: tokenizers.Tokenizer, template: str | None = None, **settings: Any
) -> Tokenizer:
    """The tokenizer as a bundle in `folder` has it."""
    built.save(str(folder / "tokenizer.json"))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return Tokenizer.open(folder, TextSettings(**settings))
