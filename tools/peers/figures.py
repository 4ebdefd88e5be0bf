"""What the runs say: medians with their ranges, and ratios of ours to theirs."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pagelet.tools.peers.measure import Record
from pagelet.tools.peers.scenarios import Scenario
from pagelet.tools.peers.worker import Sample


@dataclass(frozen=True)
class Figure:
    """A column: its values in one record, none where the entrant was not asked for it."""

    key: str
    title: str
    higher_is_better: bool
    values: Callable[[Record], list[float]]


@dataclass(frozen=True)
class Value:
    """A median and its range; `ratio` is the first entrant's median over this one."""

    median: float
    least: float
    most: float
    ratio: float | None


def step_seconds(sample: Sample, new_tokens: int) -> float:
    """Of one decode step: every sequence has its first token when they begin."""
    return (sample.seconds - sample.time_to_first_token_s) / (new_tokens - 1)


def figures(scenarios: Sequence[Scenario]) -> list[Figure]:
    """The columns that these scenarios give."""
    found: list[Figure] = []
    for scenario in scenarios:
        if scenario.key in ("plain", "long"):
            found += _alone(scenario)
        elif scenario.ours_only and scenario.sequences > 1:
            found.append(_rows(scenario))
        elif scenario.sequences > 1:
            found.append(_together(scenario))
    found.append(Figure("peak_rss", "peak RSS, MB", False, _peak_rss))
    found.append(Figure("load", "load, s", False, lambda record: record.load_s))
    return found


def _alone(scenario: Scenario) -> list[Figure]:
    key, new = scenario.key, scenario.new_tokens

    def prefill(record: Record) -> list[float]:
        return [scenario.prompt_tokens / run.time_to_first_token_s for run in record.runs.get(key, [])]

    def first(record: Record) -> list[float]:
        return [run.time_to_first_token_s for run in record.runs.get(key, [])]

    def decode(record: Record) -> list[float]:
        return [1 / step_seconds(run, new) for run in record.runs.get(key, [])]

    size = f"{scenario.prompt_tokens:,}"
    read = (
        Figure("prefill", f"prefill {size}, tok/s", True, prefill)
        if key == "plain"
        else Figure("long_first", f"first token after {size}, s", False, first)
    )
    name = "decode" if key == "plain" else "long_decode"
    return [read, Figure(name, f"decode after {size}, tok/s", True, decode)]


def _together(scenario: Scenario) -> Figure:
    """New tokens of all sequences over the whole time, prompts included."""

    def values(record: Record) -> list[float]:
        generated = scenario.sequences * scenario.new_tokens
        return [generated / run.seconds for run in record.runs.get(scenario.key, [])]

    size = f"{scenario.sequences} × ({scenario.prompt_tokens}→{scenario.new_tokens})"
    return Figure(scenario.key, f"{size}, new tok/s", True, values)


def _rows(scenario: Scenario) -> Figure:
    """A decode step of several sequences over one of a single sequence, in the same round."""

    def values(record: Record) -> list[float]:
        runs = record.runs
        pairs = zip(runs.get(scenario.key, []), runs.get("rows-1", []), strict=False)  # a round may end early
        new = scenario.new_tokens
        return [step_seconds(many, new) / step_seconds(one, new) for many, one in pairs]

    return Figure(scenario.key, f"step of {scenario.sequences} ÷ of 1", False, values)


def _peak_rss(record: Record) -> list[float]:
    return [record.peak_rss_bytes / 1e6] if record.peak_rss_bytes else []


def evaluate(figure: Figure, records: Sequence[Record]) -> list[Value | None]:
    """One value for each record; the first is the one that the others are compared with."""
    values = [figure.values(record) for record in records]
    ours = statistics.median(values[0]) if values[0] else None
    return [_value(found, ours if index else None) for index, found in enumerate(values)]


def _value(values: list[float], ours: float | None) -> Value | None:
    if not values:
        return None
    median = statistics.median(values)
    return Value(median, min(values), max(values), ours / median if ours is not None else None)
