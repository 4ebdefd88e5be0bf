"""The benchmark of speculation: its texts, its arithmetic by hand, and the whole of it on a tiny model."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from exporting import uncertified

from pagelet.exporter import export
from pagelet.models.errors import InputError
from pagelet.runtime import Engine, EngineConfig
from pagelet.tools.speculation_bench import Pair, Result, Run, Spread, main, measure, plot, results, table
from pagelet.tools.speculation_tasks import NAMES, PASSAGES, PLACES, Task, Workload, load

NEWS = "\n".join(["too short", *(" ".join(f"word{n}" for n in range(m, m + 200)) for m in range(9))])


@pytest.fixture(scope="module")
def bundle(make_llama: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("speculation") / "tiny"
    # A prompt's bytes are its tokens here, 1,700 at most.
    export(make_llama(max_position_embeddings=2048), folder, uncertified())
    return folder


def test_there_are_enough_tasks_of_a_bounded_size() -> None:
    for workload in load(NAMES, NEWS):
        assert 6 <= len(workload.tasks) <= 10
        for task in workload.tasks:
            assert 100 <= task.new_tokens <= 250
            assert 0 < len(str(task.prompt)) < 2000
        assert len({str(task.prompt) for task in workload.tasks}) == len(workload.tasks)
    assert [workload.name for workload in load(NAMES, NEWS) if not workload.is_evidence] == ["rewrite"]


def test_what_is_asked_for_is_in_the_prompt() -> None:
    for task, passage in zip(load(["copy"])[0].tasks, PASSAGES, strict=True):
        assert task.answer is not None
        assert isinstance(task.prompt, str)
        assert (task.prompt + task.answer).count(passage) == 2
        assert "  " not in passage
    for task in load(["json"])[0].tasks:
        place = json.loads(task.answer or "")
        assert place in PLACES
        assert all(value in str(task.prompt).rpartition("Text: ")[2] for value in place.values())
        assert (task.answer or "") not in str(task.prompt)


def test_news_are_the_first_words_of_long_lines() -> None:
    [news] = load(["news"], NEWS)
    assert len(news.tasks) == 6
    assert {len(str(task.prompt).split()) for task in news.tasks} == {150}
    with pytest.raises(InputError, match="no line of the news has more than 150 words"):
        load(["news"], "short\nlines")


def test_unknown_and_repeated_names() -> None:
    with pytest.raises(InputError, match=r"has copi, jason; known: copy, json"):
        load(["jason", "copi", "news"])
    with pytest.raises(InputError, match="one twice: copy, copy"):
        load(["copy", "copy"])


@pytest.mark.parametrize(
    ("text", "right"), [(" a", True), (" abc", True), (" abc, and so on", True), (" b", False), ("", True)]
)
def test_a_reply_is_right_as_far_as_it_goes(text: str, right: bool) -> None:
    assert Task("?", 3, " abc").is_answered(text) is right
    assert Task("?", 3).is_answered(text) is None


def pair(plain: float, speculating: float, drafted: int, accepted: int, answered: bool | None = None) -> Pair:
    """Of 21 new tokens: the prompt gives the first."""
    return Pair(Run(plain, 21), Run(speculating, 21, drafted, accepted), identical=True, answered=answered)


def test_the_arithmetic_by_hand() -> None:
    # 20, 5 and 10 steps for 60 tokens.
    pairs = [pair(100, 90, 0, 0), pair(80, 320, 20, 15, True), pair(120, 240, 20, 10, False)]
    assert Result.of("copy", pairs) == Result(
        name="copy",
        plain=Spread(100, 80, 120),
        speculating=Spread(240, 90, 320),
        ratio=Spread(2.0, 0.9, 4.0),
        acceptance_rate=25 / 40,
        tokens_per_step=60 / 35,
        drafted_per_step=40 / 35,
        answered=0.5,
        identical=True,
        is_evidence=True,
    )


def test_loops_and_other_texts_are_told() -> None:
    workloads = [Workload("copy", ()), Workload("news", ()), Workload("rewrite", (), is_evidence=False)]
    pairs = {
        "copy": [pair(100, 200, 20, 10)],
        "news": [pair(100, 100, 0, 0)],
        "rewrite": [replace(pair(100, 900, 20, 19), identical=False)],
    }
    found = results(workloads, pairs)
    assert [result.name for result in found] == ["copy", "news", "rewrite", "all but loops"]
    assert found[-1] == Result.of("all but loops", pairs["copy"] + pairs["news"])
    lines = table(found).splitlines()
    assert len({line.count("|") for line in lines}) == 1
    speeds = "100 [100–100] | 100 [100–100] | **1.00×** [1.00–1.00]"
    assert lines[3] == f"| news | {speeds} | – | 1.00 | 0.000 | – | the same |"
    assert lines[4].startswith("| rewrite (loops) |")
    assert lines[4].endswith("| DIFFERENT |")
    assert results(workloads[:1], pairs) == [Result.of("copy", pairs["copy"])]


def test_the_picture(tmp_path: Path) -> None:
    plot([Result.of("copy", [pair(100, 200, 20, 10)])], tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_the_engines_take_turns(bundle: Path) -> None:
    """Plain against plain: both do the same work, warm-up included."""
    workload = Workload("copy", (Task([5, 6, 7], 3), Task([8, 9], 3)))
    told: list[str] = []
    config = EngineConfig(threads=1, kv_memory="1MiB", prefix_cache=False, speculate="off")
    with Engine.open(bundle, config) as one, Engine.open(bundle, config) as other:
        pairs = measure(
            one, other, [workload], 2, lambda done, total, name: told.append(f"{done}/{total} {name}")
        )
        assert told == ["0/4 round 1, copy", "1/4 round 1, copy", "2/4 round 2, copy", "3/4 round 2, copy"]
        assert one.stats().steps == other.stats().steps
    assert all(p.identical and p.plain.steps == p.speculating.steps == 2 for p in pairs["copy"])
    result = Result.of("copy", pairs["copy"])
    assert result.acceptance_rate is None
    assert result.answered is None


def test_a_text_that_differs_is_found(bundle: Path, make_llama: Callable[..., Path], tmp_path: Path) -> None:
    """Another model stands for an engine whose guesses change the text."""
    export(make_llama(seed=1), tmp_path / "other", uncertified())
    workload = Workload("copy", (Task([5, 6, 7], 8),))
    config = EngineConfig(threads=1, kv_memory="1MiB")
    with Engine.open(bundle, config) as one, Engine.open(tmp_path / "other", config) as other:
        pairs = measure(one, other, [workload], 1, lambda *_: None)
    assert not pairs["copy"][0].identical


def test_the_whole_command(bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    news = tmp_path / "news.txt"
    news.write_text(NEWS)
    command = [str(bundle), "--threads", "1", "--repeat", "1", "--kv-memory", "2MiB", "--news", str(news)]
    assert main([*command, "--workloads", "copy,json,news", "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert {name: len(pairs) for name, pairs in whole["pairs"].items()} == {"copy": 7, "json": 7, "news": 6}
    for result in whole["results"]:
        assert result["identical"]
        assert 1 <= result["tokens_per_step"] <= 1 + result["drafted_per_step"]
    assert whole["settings"] == {"threads": 1, "repeat": 1, "speculate": "ngram"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--repeat", "0"], "--repeat is 0"),
        (["--workloads", "news"], "give --news a text"),
        (["--workloads", "chess"], "known: copy"),
        (["--news", "no/file"], "cannot read no/file"),
        (["--workloads", "copy", "--kv-memory", "lots"], "kv_memory is 'lots'"),
        (["--workloads", "copy", "--speculate", "draft"], "no draft is given"),
    ],
)
def test_bad_options(
    arguments: list[str], message: str, bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(bundle), *arguments]) == 1
    assert message in capsys.readouterr().err
