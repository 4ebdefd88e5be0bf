"""SamplingParams: what a request may ask of the sampler, validated where it enters."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from pagelet.models.errors import InputError
from pagelet.models.spec import LIMITS
from pagelet.models.strict import reject_unknown

MAX_STOPS = 64
MAX_STOP_CHARACTERS = 1_024
MAX_STOP_TOKEN_IDS = 1_024
MAX_LOGIT_BIASES = 4_096

_MAX_TOKEN_ID = LIMITS["vocab_size"] - 1
# name: (lowest, highest, advice); a value of None passes where the default is None.
_INTEGERS: dict[str, tuple[int, int, str]] = {
    "max_tokens": (1, LIMITS["max_context"], "Leave it out to generate until the context's end"),
    "top_k": (0, LIMITS["vocab_size"], "0 turns it off"),
    "seed": (0, 2**64 - 1, "Leave it out for a new one per request"),
    "logprobs": (0, 100, "0 gives the chosen token's alone, None none"),
    "n": (1, 128, "Send several requests for more"),
}
_NUMBERS: dict[str, tuple[float, float, str]] = {
    "temperature": (0.0, 100.0, "0 is greedy"),
    "top_p": (0.0, 1.0, "1 turns it off"),
    "min_p": (0.0, 1.0, "0 turns it off"),
    "repetition_penalty": (0.01, 100.0, "1 turns it off"),
    "presence_penalty": (-2.0, 2.0, "0 turns it off"),
    "frequency_penalty": (-2.0, 2.0, "0 turns it off"),
}
_NUMBER_TYPES = (int, float, np.integer, np.floating)
_MAX_BIAS = 100.0
# Logits divided by less would leave float32's range; the result is greedy's anyway.
_MIN_TEMPERATURE = 1e-5


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are drawn, and when it ends.

    Attributes:
        max_tokens: most new tokens; None: until the context is full.
        temperature: divides the logits; 0 is greedy (the lowest id of equals).
        top_k: keep the k likeliest tokens, and those equal to the last of them; 0 is off.
        top_p: keep the likeliest tokens up to this probability (Holtzman et al. 2020, nucleus sampling).
        min_p: keep tokens at least this fraction as likely as the likeliest (Nguyen et al. 2024).
        repetition_penalty: divides positive and multiplies negative logits of tokens that the prompt or
            the text has (Keskar et al. 2019, CTRL, section 4.1).
        presence_penalty, frequency_penalty: subtracted once, and once per occurrence, from the logits of
            tokens generated so far (OpenAI's API; the prompt does not count).
        logit_bias: token id to a number added to its logit, -100 to 100.
        seed: of the noise; None: the engine draws one per request.
        stop: the text ends right before the first of these strings; a single string is a list of one.
        stop_token_ids: tokens that end the text, beside the model's own.
        ignore_eos: go on past the model's end-of-sequence tokens.
        logprobs: None, or how many alternatives are reported beside the chosen token.
        n: completions of the same prompt.

    Raises:
        InputError: a value of the wrong type or out of its range.
    """

    max_tokens: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    n: int = 1

    def __post_init__(self) -> None:
        for name, (low, high, advice) in _INTEGERS.items():
            value = getattr(self, name)
            if value is not None or _DEFAULTS[name] is not None:
                self._set(name, _integer(name, value, low, high, advice))
        for name, (least, most, advice) in _NUMBERS.items():
            self._set(name, _number(name, getattr(self, name), least, most, advice))
        if 0 < self.temperature < _MIN_TEMPERATURE:
            raise InputError(
                f"temperature is {self.temperature}; expected 0 (greedy) or {_MIN_TEMPERATURE} and more."
            )
        if not isinstance(self.ignore_eos, bool):
            raise InputError(f"ignore_eos is {self.ignore_eos!r}; expected true or false.")
        self._set("stop", _stops(self.stop))
        self._set("stop_token_ids", _token_ids(self.stop_token_ids))
        self._set("logit_bias", _biases(self.logit_bias))

    def _set(self, name: str, value: object) -> None:
        """Store the checked form of a field; only while the instance is built."""
        object.__setattr__(self, name, value)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "SamplingParams":
        """Build from a JSON object, whose `logit_bias` has its token ids as strings.

        Raises:
            InputError: a key that is no field (names the nearest one), or a value that is not valid.
        """
        reject_unknown(values, (f.name for f in fields(cls)), "sampling parameters", InputError)
        checked = dict(values)
        if isinstance(bias := checked.get("logit_bias"), Mapping):
            checked["logit_bias"] = {_key_of_json(key): value for key, value in bias.items()}
        return cls(**checked)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises InputError if `logit_bias` or `stop_token_ids` has an id that the model does not."""
        for name in ("logit_bias", "stop_token_ids"):
            for token_id in getattr(self, name):
                if token_id >= vocab_size:
                    raise InputError(
                        f"{name} has token id {token_id}; this model's ids go from 0 to {vocab_size - 1}."
                    )


_DEFAULTS = {f.name: f.default for f in fields(SamplingParams)}


def _integer(name: str, value: object, low: int, high: int, advice: str) -> int:
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or not low <= value <= high:
        raise InputError(f"{name} is {_shown(value)}; expected an integer from {low} to {high}. {advice}.")
    return int(value)


def _number(name: str, value: object, low: float, high: float, advice: str) -> float:
    # A NaN fails the comparison too.
    if not isinstance(value, _NUMBER_TYPES) or isinstance(value, bool) or not low <= value <= high:
        raise InputError(f"{name} is {_shown(value)}; expected a number from {low:g} to {high:g}. {advice}.")
    return float(value)


def _shown(value: object) -> str:
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**30 else "a huge number"
    return text if len(text) <= 60 else text[:57] + "..."


def _items(name: str, value: object, limit: int, what: str) -> list[Any]:
    if not isinstance(value, Iterable) or isinstance(value, (str, bytes, Mapping)):
        raise InputError(f"{name} is {_shown(value)}; expected a list of {what}.")
    items = list(value)
    if len(items) > limit:
        raise InputError(f"{name} has {len(items)} entries; expected at most {limit}.")
    return items


def _stops(value: object) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else _items("stop", value, MAX_STOPS, "strings")
    for stop in stops:
        if not isinstance(stop, str) or not 1 <= len(stop) <= MAX_STOP_CHARACTERS:
            raise InputError(
                f"stop has the entry {_shown(stop)}; expected 1 to {MAX_STOP_CHARACTERS} characters of text."
            )
    return tuple(stops)


def _token_ids(value: object) -> tuple[int, ...]:
    ids = _items("stop_token_ids", value, MAX_STOP_TOKEN_IDS, "token ids")
    return tuple(_token_id("stop_token_ids", token_id) for token_id in ids)


def _token_id(name: str, value: object) -> int:
    return _integer(f"A token id of {name}", value, 0, _MAX_TOKEN_ID, "Ids are rows of the vocabulary")


def _biases(value: object) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise InputError(f"logit_bias is {_shown(value)}; expected an object of token ids and numbers.")
    if len(value) > MAX_LOGIT_BIASES:
        raise InputError(f"logit_bias has {len(value)} entries; expected at most {MAX_LOGIT_BIASES}.")
    return {_token_id("logit_bias", key): _bias(bias) for key, bias in value.items()}


def _bias(value: object) -> float:
    return _number("A bias in logit_bias", value, -_MAX_BIAS, _MAX_BIAS, "0 changes nothing")


def _key_of_json(key: object) -> object:
    """12 for "12"; anything else stays as it is, for the check to refuse."""
    is_decimal = isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) <= 10
    return int(key) if is_decimal else key  # type: ignore[call-overload]
