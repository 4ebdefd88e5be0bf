"""quality_bench: the table's arithmetic by hand, and whole runs over a tiny model."""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exporting import uncertified

from pagelet.exporter import ExportOptions, export
from pagelet.models.errors import InputError, PageletError
from pagelet.models.manifest import TensorEntry, load_manifest
from pagelet.tools.evaluate import EvalResult, Logits
from pagelet.tools.quality import charts, kept_logits, measure
from pagelet.tools.quality.charts import check_plot, plot_layers, plot_sizes, spread
from pagelet.tools.quality.configurations import chosen, configurations
from pagelet.tools.quality.export_process import ExportCost, ExportFailed, export_apart
from pagelet.tools.quality.kept_logits import KeptLogits, check_room
from pagelet.tools.quality.llama_cpp import PeerMissing, peers
from pagelet.tools.quality.measure import Row
from pagelet.tools.quality.report import markdown, recovered
from pagelet.tools.quality.storage import Storage, bundle_storage
from pagelet.tools.quality_bench import main

TEXT = "The tide comes in twice a day, and twice a day it leaves. " * 4
PNG = b"\x89PNG"


@pytest.fixture(scope="module")
def checkpoint(make_llama: Callable[..., Path]) -> Path:
    return make_llama()


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def row(name: str, kl: float, *, bits: float = 5.0, baseline: str = "") -> Row:
    result = EvalResult(100, 30.0, 27.5, kl, 8 * kl, 0.9)
    return Row(name, Storage(12_345_678, bits, bits - 0.5), result, ExportCost(1.25, 250_000_000), baseline)


def test_names_are_folders_of_their_own_and_every_baseline_is_there() -> None:
    known = configurations()
    names = [one.name for one in known]
    assert len(set(names)) == len(names) == 3 + 2 * (3 * 3 + 4)
    assert {one.baseline for one in known} <= {*names, ""}
    assert all(one.options["certificate_seconds"] is None for one in known)
    for one in known:
        ExportOptions(**one.options)  # which refuses what it does not know


def test_a_calibration_goes_to_those_that_look_at_one() -> None:
    given = {
        one.options.get("quantizer", "rtn") for one in configurations("a.txt") if "calibration" in one.options
    }
    assert given == {"awq", "gptq", "auto"}


def test_chosen_by_name_and_by_pattern() -> None:
    known = configurations()
    assert [one.name for one in chosen("int8,int4-g*-rtn", known)] == [
        "int8", "int4-g32-rtn", "int4-g64-rtn", "int4-g128-rtn",
    ]  # fmt: skip
    assert chosen(None, known) == known
    with pytest.raises(InputError, match="'int5'"):
        chosen("int8,int5", known)


def test_bits_per_weight_by_hand(checkpoint: Path, tmp_path: Path) -> None:
    """An int4 group of 32 with scale and minimum takes 20 bytes, one of int8 with its scale 34."""
    manifest = export(checkpoint, tmp_path / "b", uncertified())
    hidden, inner, vocab, layers = 64, 96, 320, 2
    in_layers = layers * (hidden * (64 + 32 + 32) + hidden * hidden + 3 * hidden * inner)
    tables = vocab * hidden * 2  # the embedding and an untied head
    storage = bundle_storage(manifest)
    assert storage.layer_bits_per_weight == 8 * 20 / 32
    expected = (5 * in_layers + 8.5 * tables) / (in_layers + tables)
    assert storage.bits_per_weight == pytest.approx(expected, rel=1e-12)
    assert storage.bytes == sum(path.stat().st_size for path in (tmp_path / "b").iterdir()) - (
        (tmp_path / "b" / "manifest.json").stat().st_size
    )
    assert not storage.exact
    exact = {name: replace(entry, exact=True) for name, entry in manifest.tensors.items()}
    assert bundle_storage(replace(manifest, tensors=exact)).exact
    one = {
        "embedding": TensorEntry("int8", (4, 32), 136),
        "layers.0.mlp.down": TensorEntry("int4", (2, 32), 40),
    }
    by_hand = bundle_storage(replace(manifest, tensors=one))
    assert (by_hand.bits_per_weight, by_hand.layer_bits_per_weight) == (8 * 176 / 192, 5.0)


def test_what_was_recovered() -> None:
    rows = [
        row("rtn", 0.04),
        row("gptq", 0.01, baseline="rtn"),
        row("auto", 0.02),
        row("x", 0.1, baseline="y"),
    ]
    assert [recovered(one, rows) for one in rows] == [None, 0.75, None, None]


def test_the_table_leaves_out_columns_without_values() -> None:
    plain = replace(row("a", 0.0123), cost=None)
    lines = markdown([plain, replace(plain, name="b")], ["c: why"]).splitlines()
    assert lines[0] == (
        "|  | bits per weight | without embedding and head | MB | perplexity | mean KL | p99 KL | top-1 |"
    )
    assert lines[2] == "| a | 5.00 | 4.50 | 12.3 | 30.000 | 0.0123 | 0.0984 | 90.00% |"
    assert lines[-2:] == [
        "100 tokens scored; KL in nats, from the reference, whose perplexity is 27.500.",
        "Left out: c: why.",
    ]
    full = markdown([row("a", 0.04), row("b", 0.01, baseline="a")]).splitlines()
    assert full[3].endswith("| 90.00% | 75% | 1.2 | 250 |")


def test_a_run_is_kept_and_goes_on(
    checkpoint: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "kept"
    arguments = [checkpoint, "--text", text, "--bundles", folder, "--threads", "1", "--json"]

    def run(only: str) -> tuple[dict[str, Any], str]:
        assert main([str(argument) for argument in [*arguments, "--only", only]]) == 0
        out, err = capsys.readouterr()
        return json.loads(out), err

    first, _ = run("int8")
    both, steps = run("int8,int4-g32-rtn")
    assert both["rows"][0] == first["rows"][0]
    assert steps.splitlines() == ["int4-g32-rtn: exporting", "int4-g32-rtn: scoring"]
    again, steps = run("int8,int4-g32-rtn")
    assert (again, steps) == (both, "")
    int8, int4 = both["rows"]
    assert 0 < int8["result"]["mean_kl"] < int4["result"]["mean_kl"]
    assert int8["result"]["tokens"] == len(TEXT) - 1  # bytes are tokens, and the first has no context
    assert int4["cost"]["peak_rss_bytes"] > 20e6  # NumPy alone takes that much
    assert load_manifest(folder / "int4-g32-rtn").quantization.weights == "int4"
    assert not list(folder.glob(".*"))
    text.write_text(TEXT[:100], encoding="utf-8")
    shorter, steps = run("int8")
    assert steps.splitlines() == ["int8: scoring"]  # of another text, with the same bundle
    assert shorter["rows"][0]["result"]["tokens"] == 99
    (folder / "int8.json").write_text("{", encoding="utf-8")
    assert run("int8")[1].splitlines() == ["int8: exporting", "int8: scoring"]


def test_without_a_folder_nothing_stays_and_a_failure_is_a_line(
    checkpoint: Path,
    text: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Groups of 128 do not fit a hidden size of 64; llama.cpp is not in this Python."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    peer = ["--peers", "llama_cpp", "--peer-python", sys.executable]
    picture = tmp_path / "sizes.png"
    only = ["--only", "int8,int4-g128-rtn", "--plot", str(picture), "--max-tokens", "40"]
    assert main([str(checkpoint), "--text", str(text), "--threads", "1", *only, *peer]) == 0
    out = capsys.readouterr().out
    assert "| int8 |" in out
    assert "39 tokens scored" in out
    assert "Left out: int4-g128-rtn: " in out
    assert "do not divide into groups of 128" in out
    assert "Left out: llama.cpp: llama-cpp-python is not installed" in out
    assert picture.read_bytes().startswith(PNG)
    assert {path.name for path in tmp_path.iterdir()} == {"text.txt", "sizes.png"}


def test_a_cut_run_shows_what_it_has_and_cleans_up(
    checkpoint: Path,
    text: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole, calls = measure.evaluate, []

    def cut(*given: Any) -> EvalResult:
        calls.append(given)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return whole(*given)

    monkeypatch.setattr(measure, "evaluate", cut)
    folder = tmp_path / "kept"
    only = ["--only", "int8,int4-g32-rtn", "--bundles", str(folder), "--threads", "1"]
    assert main([str(checkpoint), "--text", str(text), *only]) == 130
    out = capsys.readouterr().out
    assert "| int8 |" in out
    assert "int4" not in out
    assert not list(folder.glob(".*"))


def test_an_export_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(ExportFailed, match="does not exist"):
        export_apart(tmp_path / "nothing", tmp_path / "out", {"weights": "int8"})
    with pytest.raises(ExportFailed, match="weights is 'int3'"):
        export_apart(tmp_path, tmp_path / "out", {"weights": "int3"})


class Counting:
    """Counts what it is asked."""

    vocab_size = 3

    def __init__(self) -> None:
        self.calls = 0

    def logits(self, token_ids: Sequence[int]) -> Logits:
        self.calls += 1
        return np.float32([[token, 0.1, -token] for token in token_ids])


def test_logits_are_computed_once_and_kept_as_they_are(tmp_path: Path) -> None:
    scorer = Counting()
    kept = KeptLogits(scorer, tmp_path)
    for tokens in ([1, 2], [2, 1], [1, 2]):
        assert np.array_equal(kept.logits(tokens), scorer.logits(tokens))
    assert scorer.calls == 3 + 2
    assert kept.logits([1, 2]).dtype == np.float32


def test_room_for_the_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_room(tmp_path, 10, 100)
    monkeypatch.setattr(kept_logits.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 3_999_999}))
    with pytest.raises(InputError, match="Score fewer with --max-tokens"):
        check_room(tmp_path, 10_000, 100)


def test_pictures(tmp_path: Path) -> None:
    rows = [
        row(one.name, 0.001 * (index + 1), bits=4.5 + index / 9) for index, one in enumerate(configurations())
    ]
    rows.append(row("itself", 0.0, bits=32))
    for name, some in (("all.png", rows), ("one.png", rows[:1]), ("zero.png", rows[-1:])):
        plot_sizes(some, tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(PNG)
    plot_layers([0.1, 0.3, 0.2], "tiny", tmp_path / "layers.png")
    assert (tmp_path / "layers.png").read_bytes().startswith(PNG)


@pytest.mark.parametrize(
    "wanted", [[0.9, 0.9, 0.9, 0.1], [0.5], [0.02, 0.01, 0.0, 0.0], [1.0, 0.9, 0.85, 0.84]]
)
def test_labels_keep_their_order_and_distance(wanted: list[float]) -> None:
    gap = 0.97 / max(len(wanted), 4)
    places = spread(wanted, gap)
    assert all(above - below >= gap - 1e-12 for above, below in pairwise(places))
    assert 0 <= places[-1] <= places[0] <= 1


def test_a_picture_is_refused_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_plot(tmp_path / "a.png")
    with pytest.raises(InputError, match=r"\.png, \.svg, \.pdf"):
        check_plot(tmp_path / "a.txt")
    with pytest.raises(InputError, match="does not exist"):
        check_plot(tmp_path / "no" / "a.png")
    monkeypatch.setattr(charts, "find_spec", lambda _: None)
    with pytest.raises(InputError, match=r"pip install 'pagelet\[plot\]'"):
        check_plot(tmp_path / "a.png")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--window", "1"], "--window is 1"),
        (["--max-tokens", "1"], "--max-tokens is 1"),
        (["--peers", "other"], "knows llama_cpp"),
        (["--peers", "llama_cpp"], "needs --peer-python"),
        (["--only", "nothing"], "'nothing'"),
        (["--peers", "llama_cpp", "--peer-python", "/no/python"], "cannot be run"),
    ],
)
def test_bad_usage(
    option: list[str], message: str, checkpoint: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(checkpoint), "--text", str(text), *option]) == 1
    assert message in capsys.readouterr().err


def test_llama_cpp_needs_a_gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagelet.tools.quality.llama_cpp.installed", lambda _: {"llama-cpp-python": "1"})
    with pytest.raises(PeerMissing, match="made from a GGUF file"):
        peers(Path(sys.executable), tmp_path, 1)
    made = peers(Path(sys.executable), tmp_path / "a.gguf", 1)
    assert [peer.file for peer in made] == [
        f"llama.cpp-{form}.gguf" for form in ("F16", "Q8_0", "Q4_K_M", "Q4_0", "Q4_0-pure")
    ]


def test_a_peer_that_cannot_start_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This Python has no llama.cpp: the worker ends on its import."""
    monkeypatch.setattr("pagelet.tools.quality.llama_cpp.installed", lambda _: {"llama-cpp-python": "1"})
    source = tmp_path / "a.gguf"
    source.write_bytes(b"GGUF")
    peer = peers(Path(sys.executable), source, 1)[0]
    with pytest.raises(PageletError, match="No module named 'llama_cpp'"):
        peer.make(tmp_path / "out.gguf")
    with pytest.raises(PageletError, match="No module named 'llama_cpp'"), peer.open(source):
        pass
    assert {path.name for path in tmp_path.iterdir()} == {"a.gguf", "out.log"}
