"""How byte-level BPE tokenizers cut text before they merge, by the names that GGUF files give it.

Merges never cross a cut. The patterns and steps are those of the families' own tokenizer.json, which a GGUF
file does not hold: `tokenizer.ggml.pre` only names them.
"""

from dataclasses import dataclass
from typing import Any

from pagelet.models.errors import UnsupportedError

Step = dict[str, Any]

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_REST}"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
# Combining marks belong to the word.
_QWEN35 = _QWEN2.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]+", r"[^\s\p{L}\p{M}\p{N}]+")
_SEED = _QWEN2.replace(r"[^\s\p{L}\p{N}]+[\r\n]*", r"[^\s\p{L}\p{N}\r\n]+")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORDS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|"
    rf"\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_REST}"
)
_GPT4O = (
    _WORDS.replace(f"{_LOWER}+|", f"{_LOWER}+{_CONTRACTIONS}?|")
    .replace(f"{_LOWER}*|", f"{_LOWER}*{_CONTRACTIONS}?|")
    .replace(r"|\p{N}|", r"|\p{N}{1,3}|")
)
_DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_REST}"
)


def _split(pattern: str) -> Step:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


_DIGITS: Step = {"type": "Digits", "individual_digits": True}
_NFC: Step = {"type": "NFC"}
_DEEPSEEK3_STEPS = (_split(r"\p{N}{1,3}"), _split("[一-龥぀-ゟ゠-ヿ]+"), _split(_DEEPSEEK3))
_CODER_STEPS = tuple(map(_split, ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+")))


@dataclass(frozen=True)
class PreTokenizer:
    """Attributes:
    steps: `pre_tokenizer` steps before the byte-level one.
    gpt2_pattern: whether the byte-level step cuts with GPT-2's pattern as well.
    normalizer: what is done to the text first.
    ignore_merges: a whole word that is in the vocabulary is taken without merging it together; where it is
        not known and the vocabulary has all its words by merging (OpenAI's), it makes no difference.
    add_bos: whether raw text begins with the bos token where the file does not say it.
    """

    steps: tuple[Step, ...] = ()
    gpt2_pattern: bool = False
    normalizer: Step | None = None
    ignore_merges: bool = False
    add_bos: bool = False

    def before_merging(self, *, add_prefix_space: bool) -> Step:
        """The document's `pre_tokenizer`."""
        byte_level = {
            "type": "ByteLevel",
            "add_prefix_space": add_prefix_space,
            "trim_offsets": True,
            "use_regex": self.gpt2_pattern,
        }
        steps = [*self.steps, byte_level]
        return {"type": "Sequence", "pretokenizers": steps} if self.steps else byte_level


_GPT2 = PreTokenizer(gpt2_pattern=True)
_GPT2_NFC = PreTokenizer(gpt2_pattern=True, normalizer=_NFC)
_GPT2_DIGITS = PreTokenizer((_DIGITS,), gpt2_pattern=True)
_LLAMA = PreTokenizer((_split(_LLAMA3),), ignore_merges=True, add_bos=True)
_CL100K = PreTokenizer((_split(_LLAMA3),))
_QWEN = PreTokenizer((_split(_QWEN2),), normalizer=_NFC)
_O200K = PreTokenizer((_split(_GPT4O),), ignore_merges=True)
_DEEPSEEK = PreTokenizer(_DEEPSEEK3_STEPS)

_BY_NAME = {
    **dict.fromkeys(("gpt-2", "phi-2", "exaone4", "granite-docling"), _GPT2),
    **dict.fromkeys(("mpt", "olmo"), _GPT2_NFC),
    **dict.fromkeys(("smollm", "starcoder", "refact"), _GPT2_DIGITS),
    "command-r": PreTokenizer((_DIGITS,), gpt2_pattern=True, normalizer=_NFC),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1"), _LLAMA),
    **dict.fromkeys(("pixtral", "midm-2.0", "lfm2"), _LLAMA),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _CL100K),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez", "kormo"), _QWEN),
    "qwen35": PreTokenizer((_split(_QWEN35),), normalizer=_NFC),
    "hunyuan": PreTokenizer((_split(_QWEN2),)),
    "seed-coder": PreTokenizer((_split(_SEED),)),
    "tekken": PreTokenizer((_split(_WORDS),), ignore_merges=True, add_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), _O200K),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), _DEEPSEEK),
    "deepseek-coder": PreTokenizer((*_CODER_STEPS, _DIGITS)),
}


def pre_tokenizer(name: str) -> PreTokenizer:
    """The row of a `tokenizer.ggml.pre`.

    Raises:
        UnsupportedError: it is not known.
    """
    if name not in _BY_NAME:
        known = ", ".join(sorted(_BY_NAME))
        raise UnsupportedError(
            f"The pre-tokenizer {name!r} is not known (known: {known}). Text would be cut wrongly "
            "without it; export from a folder that holds the model's tokenizer.json."
        )
    return _BY_NAME[name]
