"""SamplingParams: every field checked, with a message that names what was found and what was expected."""

import copy
import json
import pickle

import numpy as np
import pytest

from pagelet.models.errors import InputError
from pagelet.runtime.sampling import SamplingParams

HUGE = 10**5000  # longer than Python prints


def test_the_defaults_are_greedy_and_unlimited() -> None:
    params = SamplingParams()
    assert (params.temperature, params.max_tokens, params.n, params.stop) == (0.0, None, 1, ())


def test_values_are_normalized() -> None:
    params = SamplingParams(temperature=1, stop="END", stop_token_ids=[np.int64(3)], top_k=np.int32(4))
    assert params.stop == ("END",)
    assert params.stop_token_ids == (3,)
    assert [type(value) for value in (params.temperature, params.top_k)] == [float, int]
    assert SamplingParams(stop=iter(["a", "b"])).stop == ("a", "b")  # type: ignore[arg-type]
    assert hash(params) == hash(pickle.loads(pickle.dumps(copy.deepcopy(params))))


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("max_tokens", [0, -1, 1.5, "5", True, 10**9, HUGE]),
        ("temperature", [-0.1, float("nan"), float("inf"), "1", None, True, 1e-9, 101, HUGE]),
        ("top_k", [-1, 2.0, None, 10**8]),
        ("top_p", [-0.1, 1.01, float("nan"), None]),
        ("min_p", [-0.1, 1.01, float("nan")]),
        ("repetition_penalty", [0, -1, 1000, float("nan")]),
        ("presence_penalty", [-2.1, 2.1, "0"]),
        ("frequency_penalty", [-2.1, 2.1, float("-inf")]),
        ("seed", [-1, 2**64, 1.0, "1"]),
        ("logprobs", [-1, 101, True]),
        ("n", [0, 129, 10**6, None]),
        ("ignore_eos", [1, "true", None]),
        ("stop", [5, [""], "", [1], ["x"] * 65, ["x" * 1025], {"a": 1}, b"x", None]),
        ("stop_token_ids", [5, "5", ["1"], [-1], [2**40], [0] * 1025, [True], None]),
        (
            "logit_bias",
            [[1], {1: 101}, {1: float("nan")}, {-1: 0}, {"x": 1}, dict.fromkeys(range(4097), 0)],
        ),
    ],
)
def test_bad_values_are_refused_by_name(field: str, bad: list[object]) -> None:
    for value in bad:
        with pytest.raises(InputError, match=field) as caught:
            SamplingParams(**{field: value})  # type: ignore[arg-type]
        assert "expected" in str(caught.value)
        assert len(str(caught.value)) < 250


def test_from_dict_reads_json_and_names_the_nearest_key() -> None:
    text = '{"temperature": 0.5, "stop": ["a"], "logit_bias": {"12": -100, "7": 1.5}, "seed": null}'
    params = SamplingParams.from_dict(json.loads(text))
    assert params == SamplingParams(temperature=0.5, stop=("a",), logit_bias={12: -100.0, 7: 1.5})
    with pytest.raises(InputError, match="'temprature'; did you mean 'temperature'"):
        SamplingParams.from_dict({"temprature": 1})
    for key in ("1.5", "-1", " 1", "²", "9" * 5000):
        with pytest.raises(InputError, match="logit_bias"):
            SamplingParams.from_dict({"logit_bias": {key: 1}})


def test_ids_beyond_the_vocabulary_are_refused() -> None:
    for params in (SamplingParams(logit_bias={100: 1}), SamplingParams(stop_token_ids=[100])):
        params.check_vocabulary(101)
        with pytest.raises(InputError, match="token id 100; this model's ids go from 0 to 99"):
            params.check_vocabulary(100)
