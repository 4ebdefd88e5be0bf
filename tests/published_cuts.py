"""How the published tokenizers cut text, by the library's own classes and with the patterns as published."""

import inspect
from typing import Any

from tokenizers import Regex, pre_tokenizers
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX as QWEN2
from transformers.models.qwen3_5.tokenization_qwen3_5 import PRETOKENIZE_REGEX as QWEN35

LLAMA3: str = inspect.signature(TikTokenConverter.__init__).parameters["pattern"].default
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SEED = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
)
CODER = ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+")


def splits(*patterns: str, digits: bool = False) -> Any:
    """Each pattern in turn, then every digit by itself, then the bytes."""
    steps: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    steps += [pre_tokenizers.Digits(individual_digits=True)] * digits
    return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(False, use_regex=False)])


PLAIN = pre_tokenizers.ByteLevel(add_prefix_space=False)
DIGITS = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), PLAIN])

# `tokenizer.ggml.pre` to the cut, and whether characters are composed first (NFC).
CUTS: dict[str, tuple[Any, bool]] = {
    "gpt-2": (PLAIN, False),
    "olmo": (PLAIN, True),
    "smollm": (DIGITS, False),
    "starcoder": (DIGITS, False),
    "refact": (DIGITS, False),
    "command-r": (DIGITS, True),
    "llama-bpe": (splits(LLAMA3), False),
    "falcon3": (splits(LLAMA3), False),
    "dbrx": (splits(LLAMA3), False),
    "qwen2": (splits(QWEN2), True),
    "qwen35": (splits(QWEN35), True),
    "hunyuan": (splits(QWEN2), False),
    "seed-coder": (splits(SEED), False),
    "tekken": (splits(TEKKEN), False),
    "gpt-4o": (splits(GPT4O), False),
    "deepseek-v3": (splits(*DEEPSEEK3), False),
    "deepseek-coder": (splits(*CODER, digits=True), False),
}
# A whole word that is in the vocabulary is taken without merging.
WHOLE_WORDS = ("llama-bpe", "falcon3", "tekken", "gpt-4o")
