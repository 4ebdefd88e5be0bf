"""An export that was cut goes on, and ends in the same bytes; one that failed leaves nothing."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from pagelet.exporter import ExportOptions, export
from pagelet.models.certificate import load_certificate
from pagelet.models.errors import CheckpointError, InputError, UnfinishedError
from pagelet.models.manifest import load_manifest

MakeCheckpoint = Callable[..., Path]
Step = tuple[int, int, str]
QUANTIZERS = ("rtn", "gptq", "awq", "auto")


@pytest.fixture(scope="module")
def source(make_llama: MakeCheckpoint) -> Path:
    """As small as it gets; the head is its own, so that something is left to do behind the last layer."""
    return make_llama(
        hidden_size=32,
        intermediate_size=32,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_hidden_layers=2,
    )


@pytest.fixture(scope="module")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("calibration") / "text.txt"
    path.write_text("".join(f"The {n}th of {n * n % 97} steps, and {n % 7} more. " for n in range(40)))
    return path


def options_of(quantizer: str, calibration: Path, **changes: Any) -> ExportOptions:
    given: dict[str, Any] = {"certificate_seconds": None, "embedding": "int4", "quantizer": quantizer}
    if quantizer == "auto":
        given["bits_per_weight"] = 5.5
    if quantizer != "rtn":
        given |= {"calibration": calibration, "calibration_tokens": 1024}
    return ExportOptions(**(given | changes))


def hashes(bundle: Path) -> dict[str, str]:
    files = [path for path in bundle.rglob("*") if path.is_file()]
    return {path.relative_to(bundle).as_posix(): sha256(path.read_bytes()).hexdigest() for path in files}


def run(source: Path, out: Path, options: ExportOptions) -> list[Step]:
    """Export; the steps that were done."""
    steps: list[Step] = []
    export(source, out, options, on_progress=lambda *step: steps.append(step))
    return steps


def cut(source: Path, out: Path, options: ExportOptions, after: int) -> None:
    """An export that Ctrl-C meets in the step that follows so many."""
    calls = 0

    def interrupt(*step: object) -> None:
        nonlocal calls
        calls += 1
        if calls > after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export(source, out, options, on_progress=interrupt)


@pytest.fixture(scope="module")
def uncut(
    source: Path, calibration: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[dict[str, str], list[Step]]]:
    """Files and steps of an export that nothing stops."""
    home = tmp_path_factory.mktemp("uncut")
    known: dict[str, tuple[dict[str, str], list[Step]]] = {}

    def exported(quantizer: str) -> tuple[dict[str, str], list[Step]]:
        if quantizer not in known:
            steps = run(source, home / quantizer, options_of(quantizer, calibration))
            known[quantizer] = hashes(home / quantizer), steps
        return known[quantizer]

    return exported


def kept(steps: list[Step], at: int) -> int:
    """How many of the steps need not be done again after a cut in step `at`."""
    names = [name for _, _, name in steps]
    # The formats of `auto` are kept too: behind them comes the embedding.
    starts = [names.index("layers.1"), names.index("head")]
    if "measure head" in names:
        starts.append(names.index("embedding"))
    return max([0, *(start for start in starts if start <= at)])


@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_a_cut_anywhere_ends_in_the_same_bytes(
    quantizer: str, source: Path, calibration: Path, uncut: Callable[..., Any], tmp_path: Path
) -> None:
    options = options_of(quantizer, calibration)
    files, steps = uncut(quantizer)
    assert (steps[-1][2], len(steps)) == ("", 13 + (4 if quantizer == "auto" else 0))
    # Every step where they are fast; elsewhere one of each kind.
    names = [name for *_, name in steps]
    places = (
        "measure layers.1",
        "embedding",
        "layers.0.mlp.down",
        "layers.1",
        "layers.1.attention.o",
        "head",
        "",
    )
    chosen = (
        range(len(steps)) if quantizer == "rtn" else [names.index(name) for name in places if name in names]
    )
    for at in chosen:
        cut(source, tmp_path / "b", options, at)
        left = [path.name for path in tmp_path.iterdir()]
        assert left == ([f".b.partial-{os.getpid()}"] if kept(steps, at) else [])
        assert run(source, tmp_path / "b", options) == steps[kept(steps, at) :]
        assert hashes(tmp_path / "b") == files
        assert [path.name for path in tmp_path.iterdir()] == ["b"]
        shutil.rmtree(tmp_path / "b")


@pytest.mark.parametrize("quantizer", ["gptq", "auto"])
def test_one_that_is_cut_again_and_again(
    quantizer: str, source: Path, calibration: Path, uncut: Callable[..., Any], tmp_path: Path
) -> None:
    options = options_of(quantizer, calibration)
    files, steps = uncut(quantizer)
    names = [name for _, _, name in steps]
    done = 0
    for name in ("layers.1", "layers.1.attention.o", "head"):
        cut(source, tmp_path / "b", options, names.index(name) - done)
        done = kept(steps, names.index(name))
    assert [name for *_, name in run(source, tmp_path / "b", options)] == ["head", ""]
    assert hashes(tmp_path / "b") == files


def test_one_that_is_killed(
    source: Path, calibration: Path, uncut: Callable[..., Any], tmp_path: Path
) -> None:
    """By a signal that lets nothing be tidied, while the second layer is written."""
    code = (
        "import os, sys; from pathlib import Path; from pagelet.exporter import ExportOptions, export\n"
        "def kill(done, total, name):\n"
        "    if name == 'layers.1.mlp.down': os.kill(os.getpid(), 9)\n"
        "source, out, text = map(Path, sys.argv[1:])\n"
        "options = ExportOptions(certificate_seconds=None, embedding='int4', quantizer='gptq',\n"
        "                        calibration=text, calibration_tokens=1024)\n"
        "export(source, out, options, on_progress=kill)\n"
    )
    arguments = [str(path) for path in (source, tmp_path / "b", calibration)]
    assert subprocess.run([sys.executable, "-c", code, *arguments]).returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert re.fullmatch(r"\.b\.partial-\d+", left.name)
    files, steps = uncut("gptq")
    done = run(source, tmp_path / "b", options_of("gptq", calibration))
    assert done == steps[[name for *_, name in steps].index("layers.1") :]
    assert hashes(tmp_path / "b") == files
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


def test_one_that_still_runs_is_left_alone(source: Path, calibration: Path, tmp_path: Path) -> None:
    options = options_of("rtn", calibration)
    cut(source, tmp_path / "b", options, 10)
    (left,) = tmp_path.iterdir()
    running = tmp_path / f".b.partial-{os.getppid()}"
    left.rename(running)
    assert len(run(source, tmp_path / "b", options)) == 13
    assert sorted(path.name for path in tmp_path.iterdir()) == [running.name, "b"]


def move(source: Path, folder: Path) -> Path:
    shutil.copytree(source, folder / "copy")
    return folder / "copy"


@pytest.mark.parametrize("other", ["options", "calibration", "source", "weights"])
def test_another_export_does_not_go_on_with_it(
    other: str, source: Path, calibration: Path, tmp_path: Path
) -> None:
    home, apart = tmp_path / "home", tmp_path / "apart"
    home.mkdir()
    apart.mkdir()
    text, checkpoint = Path(shutil.copy(calibration, apart / "text.txt")), move(source, apart)
    options = options_of("gptq", text)
    cut(checkpoint, home / "b", options, 9)
    if other == "options":
        options = replace(options, desc_act=False)
    elif other == "calibration":
        text.write_text(text.read_text().replace("steps", "paces"))
    elif other == "source":
        checkpoint = source
    else:
        weights = load_file(checkpoint / "model.safetensors")
        weights["model.layers.0.mlp.up_proj.weight"] *= np.float32(1.5)
        save_file(weights, checkpoint / "model.safetensors", {"format": "pt"})
    steps = run(checkpoint, home / "b", options)
    assert len(steps) == 13
    assert [path.name for path in home.iterdir()] == ["b"]
    assert run(checkpoint, apart / "fresh", options) == steps
    assert hashes(home / "b") == hashes(apart / "fresh")


def test_nothing_of_another_export_gets_into_the_bundle(
    source: Path, calibration: Path, tmp_path: Path
) -> None:
    checkpoint = move(source, tmp_path)
    (checkpoint / "chat_template.jinja").write_text("{{ messages }}")
    cut(checkpoint, tmp_path / "b", options_of("gptq", calibration), 9)
    run(source, tmp_path / "b", options_of("rtn", calibration))
    assert "chat_template.jinja" not in hashes(tmp_path / "b")


def edit(**changes: Any) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / "resume.json"
        seal, body = path.read_bytes().split(b"\n")
        path.write_bytes(seal + b"\n" + json.dumps(json.loads(body) | changes).encode())

    return damage


def write(name: str, data: bytes) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        assert (folder / name).is_file()
        (folder / name).write_bytes(data)

    return damage


def shorten(name: str, length: int) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / name, length)


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def reshape(folder: Path) -> None:
    np.savez(folder / "stream-1.npz", residual=np.zeros((3, 3), np.float32))


# A file that a power cut left empty or short, or that somebody removed.
DAMAGES = {
    "no json": write("resume.json", b""),
    "half a json": shorten("resume.json", 500),
    "binary": write("resume.json", b"\xff\0\xfe"),
    "a list": write("resume.json", b"[]"),
    "an older format": edit(linears={"embedding": {"old": 1}}),
    "half a residual": shorten("stream-1.npz", 5000),
    "no array": write("stream-1.npz", b"not an array at all"),
    "an empty residual": shorten("stream-1.npz", 0),
    "no residual": remove("stream-1.npz"),
    "a residual of another shape": reshape,
    "lists for tables": edit(linears=[]),
    "no number of layers": edit(layers="one"),
    "layers that are not there": edit(layers=2),
    "no matrices": edit(linears={}, entries={}),
    "no length": edit(length="long"),
    "no weights": remove("model.weights"),
    "half the weights": shorten("model.weights", 5000),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_records_are_not_used(
    damage: str, source: Path, calibration: Path, uncut: Callable[..., Any], tmp_path: Path
) -> None:
    quantizer = "gptq" if "array" in damage or "residual" in damage else "rtn"
    files, steps = uncut(quantizer)
    options = options_of(quantizer, calibration)
    cut(source, tmp_path / "b", options, 9)
    (folder,) = tmp_path.iterdir()
    DAMAGES[damage](folder)
    assert run(source, tmp_path / "b", options) == steps
    assert hashes(tmp_path / "b") == files


def test_damaged_formats_are_found_again(
    source: Path, calibration: Path, uncut: Callable[..., Any], tmp_path: Path
) -> None:
    files, steps = uncut("auto")
    options = options_of("auto", calibration)
    cut(source, tmp_path / "b", options, 6)
    (folder,) = tmp_path.iterdir()
    shorten("formats.json", 100)(folder)
    assert run(source, tmp_path / "b", options) == steps
    assert hashes(tmp_path / "b") == files


# ---- errors ----


def changed(source: Path, folder: Path, name: str, value: float) -> Path:
    checkpoint = move(source, folder)
    weights = load_file(checkpoint / "model.safetensors")
    weights[name].flat[5] = value
    save_file(weights, checkpoint / "model.safetensors", {"format": "pt"})
    return checkpoint


@pytest.mark.parametrize("quantizer", QUANTIZERS)
@pytest.mark.parametrize(
    "name", ["model.layers.1.mlp.up_proj.weight", "model.layers.1.input_layernorm.weight"]
)
def test_a_damaged_weight_is_named_and_nothing_stays(
    quantizer: str, name: str, source: Path, calibration: Path, tmp_path: Path
) -> None:
    """Behind a layer that is written."""
    (tmp_path / "out").mkdir()
    checkpoint = changed(source, tmp_path, name, np.nan)
    with pytest.raises(CheckpointError, match=re.escape(f"{name} holds NaN or infinity")):
        export(checkpoint, tmp_path / "out" / "b", options_of(quantizer, calibration))
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("quantizer", ["rtn", "gptq", "awq"])
def test_a_group_size_that_does_not_divide_is_named(
    quantizer: str, make_llama: MakeCheckpoint, calibration: Path, tmp_path: Path
) -> None:
    checkpoint = make_llama(num_hidden_layers=1)  # 64 inputs, and 96 of down
    options = options_of(quantizer, calibration, group_size=64)
    with pytest.raises(CheckpointError, match=r"down"):
        export(checkpoint, tmp_path / "b", options)
    assert list(tmp_path.iterdir()) == []


def test_auto_names_a_matrix_that_no_group_divides(
    make_llama: MakeCheckpoint, calibration: Path, tmp_path: Path
) -> None:
    checkpoint = make_llama(num_hidden_layers=1, intermediate_size=80)
    with pytest.raises(
        CheckpointError, match=r"down_proj\.weight: 80 inputs do not divide into groups of 32"
    ):
        export(checkpoint, tmp_path / "b", options_of("auto", calibration))
    assert list(tmp_path.iterdir()) == []


def test_a_text_that_is_too_short_leaves_nothing(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "short.txt").write_text("too short")
    with pytest.raises(InputError, match=r"short\.txt has 9 tokens"):
        export(source, tmp_path / "out" / "b", options_of("gptq", tmp_path / "short.txt"))
    assert list((tmp_path / "out").iterdir()) == []


def test_what_was_kept_goes_with_an_error(source: Path, calibration: Path, tmp_path: Path) -> None:
    options = options_of("gptq", calibration)
    cut(source, tmp_path / "b", options, 9)

    def fail(*step: object) -> None:
        raise RuntimeError("a disk, say")

    with pytest.raises(RuntimeError, match="a disk, say"):
        export(source, tmp_path / "b", options, on_progress=fail)
    assert list(tmp_path.iterdir()) == []


# ---- a bundle too far from its original ----


@pytest.fixture
def refused(source: Path, calibration: Path, tmp_path: Path) -> tuple[ExportOptions, str]:
    """An export over its limit to tmp_path/b: its options, and the refusal."""
    options = options_of("gptq", calibration, certificate_seconds=0.01, max_kl=1e-6)
    with pytest.raises(UnfinishedError) as refusal:
        export(source, tmp_path / "b", options)
    return options, str(refusal.value)


def test_the_refusal_says_how_far(refused: tuple[ExportOptions, str], tmp_path: Path) -> None:
    _, message = refused
    found = re.search(
        r"mean KL divergence (\S+) nats, limit 1e-06 \(perplexity (\S+) before, (\S+) after; the same first "
        r"choice for (\S+)% of \d+ tokens; layers with the largest error: \d \((\S+)%\), \d \((\S+)%\)\)\.",
        message,
    )
    assert found, message
    kl, before, after, agreement, worst, next_worst = map(float, found.groups())
    assert kl > 1e-6
    assert before > 1 < after
    assert 0 < agreement <= 100
    assert worst >= next_worst > 0
    assert [path.name for path in tmp_path.iterdir()] == [f".b.partial-{os.getpid()}"]


@pytest.mark.parametrize(("changes", "forced"), [({"accept_loss": True}, True), ({"max_kl": 100.0}, False)])
def test_what_was_quantized_is_kept_for_another_answer(
    changes: dict[str, Any],
    forced: bool,
    refused: tuple[ExportOptions, str],
    source: Path,
    uncut: Callable[..., Any],
    tmp_path: Path,
) -> None:
    options = replace(refused[0], **changes)
    steps = run(source, tmp_path / "b", options)
    assert steps[0][2] == "head"
    assert not [name for *_, name in steps if name.startswith("layers.0.")]
    assert [path.name for path in tmp_path.iterdir()] == ["b"]
    certificate = load_certificate(tmp_path / "b", load_manifest(tmp_path / "b"))
    assert certificate is not None
    assert (certificate.forced, certificate.max_kl) == (forced, options.max_kl)
    assert (certificate.quality.mean_kl > options.kl_limit) == forced
    files, _ = uncut("gptq")
    found = hashes(tmp_path / "b")
    assert {name: found[name] for name in files if name != "manifest.json"} == {
        name: value for name, value in files.items() if name != "manifest.json"
    }


def test_under_its_limit_nothing_is_forced(source: Path, calibration: Path, tmp_path: Path) -> None:
    options = options_of("rtn", calibration, certificate_seconds=0.01, max_kl=100.0, accept_loss=True)
    export(source, tmp_path / "b", options)
    certificate = load_certificate(tmp_path / "b", load_manifest(tmp_path / "b"))
    assert certificate is not None
    assert not certificate.forced
