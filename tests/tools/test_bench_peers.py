"""bench_peers: prompts, ratios and tables by hand, and whole rounds with real workers."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from exporting import uncertified

from pagelet.exporter import export
from pagelet.models.errors import InputError, PageletError
from pagelet.models.manifest import load_manifest
from pagelet.tools.bench_peers import main, prompt_tokens
from pagelet.tools.peers import measure as measuring
from pagelet.tools.peers.entrants import PEERS, Entrant
from pagelet.tools.peers.figures import Value, evaluate, figures
from pagelet.tools.peers.measure import Record, Rounds, measure
from pagelet.tools.peers.prepare import Sources, convert, installed, prepare
from pagelet.tools.peers.report import cell, markdown, number, plot
from pagelet.tools.peers.scenarios import Scenario, Sizes, prompts, scenarios
from pagelet.tools.peers.worker import Sample, Worker, WorkerError

WORKERS = Path(measuring.__file__).with_name("workers")
SMALL = {
    "prompt-tokens": 24,
    "new-tokens": 4,
    "long-prompt-tokens": 40,
    "long-new-tokens": 2,
    "batch-tokens": 8,
    "batches": "2",
    "rows": "2",
    "row-tokens": 4,
}


@pytest.fixture(scope="module")
def bundle(make_llama: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("peers") / "tiny"
    export(make_llama(), folder, uncertified())
    return folder


@pytest.fixture
def entrant(bundle: Path) -> Entrant:
    return Entrant("pagelet tiny", "pagelet", bundle, Path(sys.executable), "pagelet")


def test_prompts_differ_in_their_first_tokens_only() -> None:
    scenario = Scenario("plain", prompt_tokens=5, new_tokens=2, sequences=3)
    allowed = range(10, 100)
    rounds = [prompts(scenario, index, allowed) for index in range(4)]
    assert len({prompt[0] for one in rounds for prompt in one}) == 12
    assert all([p[1:] for p in one] == [p[1:] for p in rounds[0]] for one in rounds)
    assert len({tuple(prompt[1:]) for prompt in rounds[0]}) == 3
    assert all(token in allowed for one in rounds for prompt in one for token in prompt)


def test_special_tokens_stand_in_no_prompt(bundle: Path) -> None:
    tokens = prompt_tokens(bundle, load_manifest(bundle))
    assert tokens == list(range(2, 320))  # <bos> is 0, <eos> is 1


def record(name: str, first: float, decode: float, engine: str = "pagelet") -> Record:
    """Runs of 100 prompt and 11 new tokens; the middle one takes `first`, then `decode` seconds."""
    runs = [Sample(first * f, (first + decode) * f, 5_000_000) for f in (0.5, 1.0, 4.0)]
    entrant = Entrant(name, engine, Path("m"), Path("p"), "v")
    return Record(entrant, load_s=[0.3, 0.1, 0.2], peak_rss_bytes=5_000_000, runs={"plain": runs})


def test_figures_by_hand() -> None:
    columns = {figure.key: figure for figure in figures([Scenario("plain", 100, 11)])}
    records = [record("ours", 0.5, 2.0), record("theirs", 1.0, 1.0, "other")]
    # 100 tokens in 0.5 s, and ten steps in 2 s.
    assert evaluate(columns["prefill"], records) == [Value(200, 50, 400, None), Value(100, 25, 200, 2.0)]
    assert evaluate(columns["decode"], records) == [Value(5, 1.25, 10, None), Value(10, 2.5, 20, 0.5)]
    assert evaluate(columns["load"], records)[0] == Value(0.2, 0.1, 0.3, None)
    assert evaluate(columns["peak_rss"], records)[1] == Value(5, 5, 5, 1.0)


def test_a_step_of_several_rows_over_one_of_one() -> None:
    shapes = [Scenario(f"rows-{n}", 8, 5, n, ours_only=True) for n in (1, 4)]
    ours = Record(Entrant("ours", "pagelet", Path("m"), Path("p"), "v"))
    ours.runs = {"rows-1": [Sample(1, 5, 0), Sample(1, 3, 0)], "rows-4": [Sample(1, 7, 0), Sample(2, 6, 0)]}
    figure = figures(shapes)[0]
    assert figure.values(ours) == [1.5, 2.0]  # 6/4 over 4/4, then 4/4 over 2/4
    assert figure.values(record("theirs", 1, 1)) == []


def test_many_sequences_count_all_their_tokens() -> None:
    scenario = Scenario("batch-8", 128, 128, 8)
    one = Record(Entrant("ours", "pagelet", Path("m"), Path("p"), "v"), runs={"batch-8": [Sample(1, 4, 0)]})
    assert figures([scenario])[0].values(one) == [256.0]


@pytest.mark.parametrize(
    ("value", "text"),
    [(1234.4, "1234"), (99.96, "100.0"), (12.345, "12.3"), (1.234, "1.23"), (0.1234, "0.123")],
)
def test_numbers(value: float, text: str) -> None:
    assert number(value) == text


def test_cells() -> None:
    assert cell(None) == "–"
    assert cell(Value(2.0, 2.0, 2.0, None)) == "2.00"
    assert cell(Value(150.0, 140.0, 160.0, 1.5)) == "150 [140–160] **1.50×**"


def test_the_table_has_a_row_for_each_and_says_who_is_missing() -> None:
    broken = record("broken", 1, 1, "other")
    broken.failure, broken.runs = "it fell over", {}
    columns = figures([Scenario("plain", 100, 11)])
    lines = markdown(columns, [record("ours", 0.5, 2.0), broken], ["absent: not installed"]).splitlines()
    assert lines[0].count("|") == lines[1].count("|") == lines[2].count("|") == lines[3].count("|")
    assert lines[2].startswith("| ours | 200 [50.0–400] | 5.00 [1.25–10.0] |")
    assert lines[3].startswith("| broken | – | – |")
    assert lines[-2:] == ["Left out: absent: not installed.", "Left out: broken: it fell over."]


def test_the_picture_shows_what_several_have(tmp_path: Path) -> None:
    columns = figures([Scenario("plain", 100, 11), Scenario("rows-4", 8, 5, 4, ours_only=True)])
    plot(columns, [record("ours", 0.5, 2.0), record("theirs", 1.0, 1.0, "other")], tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_the_worker_protocol(bundle: Path) -> None:
    """What stands on its stdout is JSON only, and a bad order does not end it."""
    orders = [
        {"prompts": [[5, 6, 7], [8, 9, 10]], "new_tokens": 3},
        {"prompts": [[999_999]], "new_tokens": 3},
        {"prompts": [[5, 6, 7]], "new_tokens": 2},
    ]
    command = [sys.executable, WORKERS, "pagelet", bundle, "--threads", "1", "--tokens", "64"]
    text = "".join(json.dumps(order) + "\n" for order in orders)
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=True)
    opened, first, bad, last = (json.loads(line) for line in done.stdout.splitlines())
    assert opened["load_s"] > 0
    assert first["generated_tokens"] == 6
    assert 0 < first["time_to_first_token_s"] <= first["seconds"]
    assert first["peak_rss_bytes"] > 10e6
    assert "999999" in bad["error"]
    assert last["generated_tokens"] == 2


def test_the_workers_import_nothing_of_ours_but_ours() -> None:
    importing = [path.name for path in WORKERS.glob("*.py") if "from pagelet" in path.read_text()]
    assert importing == ["run_pagelet.py"]


def test_rounds_are_whole_and_warm_ups_do_not_count(entrant: Entrant, tmp_path: Path) -> None:
    shapes = [Scenario("plain", 6, 3), Scenario("long", 20, 2, every=2)]
    told: list[str] = []
    one = Record(entrant)
    measure([one], Rounds(shapes, 3, 1, range(2, 320), tmp_path, loads=2), told.append)
    assert {key: len(runs) for key, runs in one.runs.items()} == {"plain": 3, "long": 2}
    assert len(one.load_s) == 2
    assert [text.partition(":")[0] for text in told[1:]] == [
        "round 0 of 3, plain",
        "round 1 of 3, plain",
        "round 1 of 3, long",
        "round 2 of 3, plain",
        "round 3 of 3, plain",
        "round 3 of 3, long",
    ]


def test_nothing_begins_after_the_limit(entrant: Entrant, tmp_path: Path) -> None:
    one = Record(entrant)
    rounds = Rounds([Scenario("plain", 6, 3)], 3, 1, range(2, 320), tmp_path, loads=1, limit_s=0)
    measure([one], rounds, lambda _: None)
    assert one.runs == {}
    assert len(one.load_s) == 1


def test_a_peer_that_fails_is_noted_and_ours_raises(entrant: Entrant, tmp_path: Path) -> None:
    """The other engine is a real process that ends at once."""
    none = Entrant("gone", "llama_cpp", tmp_path / "no.gguf", Path(sys.executable), "v")
    records = [Record(entrant), Record(none)]
    rounds = Rounds([Scenario("plain", 6, 3)], 1, 1, range(2, 320), tmp_path, loads=1)
    measure(records, rounds, lambda _: None)
    assert len(records[0].runs["plain"]) == 1
    assert "gone ended with status" in records[1].failure
    assert records[1].runs == {}
    ours = Entrant("ours", "pagelet", tmp_path / "no bundle", Path(sys.executable), "v")
    with pytest.raises(WorkerError, match="ours ended with status 1; see"):
        measure([Record(ours)], rounds, lambda _: None)


def test_a_run_that_ends_early_is_no_measurement(entrant: Entrant, tmp_path: Path) -> None:
    """More tokens than the model's context of 512: the engine stops at its end."""
    with (
        Worker(entrant, 1, 600, tmp_path / "log") as worker,
        pytest.raises(WorkerError, match="pagelet tiny"),
    ):
        worker.run([[5] * 400], 300)


def test_the_whole_command(bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = [text for name, value in SMALL.items() for text in (f"--{name}", str(value))]
    output = tmp_path / "out.json"
    command = [
        "--bundle",
        str(bundle),
        "--bundle",
        str(bundle),
        "--engines",
        "",
        "--work",
        str(tmp_path / "w"),
    ]
    assert main([*command, "--repeat", "1", "--threads", "1", "--json", str(output), *sizes]) == 0
    out = capsys.readouterr().out
    assert out.count("| pagelet tiny |") == 2
    whole = json.loads(output.read_text())
    first, second = whole["entrants"]
    assert set(first["runs"]) == {"plain", "rows-1", "rows-2", "batch-2", "long"}
    assert first["figures"]["prefill"]["ratio"] is None
    ratio = first["figures"]["decode"]["median"] / second["figures"]["decode"]["median"]
    assert second["figures"]["decode"]["ratio"] == ratio
    assert whole["titles"]["rows-2"] == "step of 2 ÷ of 1"
    assert whole["machine"]["processor"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--repeat", "0"], "--repeat is 0"),
        (["--threads", "5000"], "--threads is 5000"),
        (["--batches", "8,64"], "--batches is 64"),
        (["--new-tokens", "1"], "--new-tokens is 1; expected 2"),
        (["--engines", "vllm"], "known: llama_cpp"),
        (["--scenarios", "plain,fast"], "--scenarios has fast"),
        (["--python", "no/python"], "no/python cannot be run"),
    ],
)
def test_bad_options(
    arguments: list[str], message: str, bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--bundle", str(bundle), "--work", str(tmp_path), *arguments]) == 1
    assert message in capsys.readouterr().err


def test_every_shape_is_checked() -> None:
    with pytest.raises(InputError, match="--long-prompt-tokens is 0"):
        Sizes(long_prompt_tokens=0)
    assert max(scenario.tokens for scenario in scenarios(Sizes())) == 4128


def test_a_peer_that_is_not_installed_is_left_out(tmp_path: Path) -> None:
    here = Path(sys.executable)
    sources = Sources(None, None, tmp_path, here, here)
    found = prepare(sources, ["llama_cpp", "transformers"], lambda _: None)
    assert found.entrants == []
    missing = [line.partition(":")[0] for line in found.left_out]
    assert missing == ["llama.cpp Q4_0", "llama.cpp, GGUF as it is", "transformers float32"]
    assert found.left_out[-1] == "transformers float32: needs --gguf"  # it is here; its model is not


def test_a_model_that_cannot_be_made_leaves_its_log_and_nothing_else(tmp_path: Path) -> None:
    """llama.cpp's own quantizer is given a file that is no model; where it is not installed, none at all."""
    (tmp_path / "m.gguf").write_bytes(b"no model")
    here = Path(sys.executable)
    sources = Sources(tmp_path / "m.gguf", None, tmp_path, here, here)
    with pytest.raises(PageletError, match=r"could not be made from .*m\.gguf; see .*llama_cpp\.log"):
        convert(sources, "llama_cpp", tmp_path / "m.gguf", lambda _: None)
    assert not list(tmp_path.glob("m.llama_cpp"))
    assert (tmp_path / "llama_cpp.log").read_text()


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_a_real_peer_generates(peer, make_llama: Callable[..., Path], tmp_path: Path) -> None:
    """Those that are installed in this very interpreter, on a tiny model."""
    here = Path(sys.executable)
    if peer.package not in installed(here):
        pytest.skip(f"{peer.package} is not installed")
    if peer.source == "gguf":
        pytest.skip("no tiny GGUF is at hand")
    sources = Sources(None, make_llama(), tmp_path, here, here)
    found = prepare(sources, [peer.engine], lambda _: None)
    [ready] = [entrant for entrant in found.entrants if entrant.name == peer.name]
    with Worker(ready, 1, 64, tmp_path / "log") as worker:
        assert worker.run([[5, 6, 7]], 4).seconds > 0
