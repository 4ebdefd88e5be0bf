"""The program as its users meet it: output, JSON, exit codes, errors in one line."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pagelet.tools.cli import main

MakeCheckpoint = Callable[..., Path]


@pytest.fixture(scope="module")
def bundle(make_llama: MakeCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("cli") / "bundle"
    assert main(["export", str(make_llama()), str(out), "--no-certificate"]) == 0
    return out


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    status = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return status, out, err


def test_export_says_what_it_made(
    make_llama: MakeCheckpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = make_llama()
    options = ("--weights", "fp32", "--certificate-seconds", 1, "--json")
    status, out, err = run(capsys, "export", checkpoint, tmp_path / "b", *options)
    assert (status, err) == (0, "")
    assert json.loads(out)["quantization"]["weights"] == "fp32"
    assert json.loads(out)["certificate"] == "certificate.json"
    status, out, err = run(capsys, "export", checkpoint, tmp_path / "b")
    assert (status, out) == (1, "")
    assert err.startswith("pagelet: ")
    assert err.count("\n") == 1
    assert "--force" in err


def test_export_takes_an_adapter(
    make_llama: MakeCheckpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = tmp_path / "lora"
    status, _, err = run(capsys, "export", make_llama(), tmp_path / "b", "--adapter", adapter)
    assert (status, err) == (1, f"pagelet: {adapter} is no folder; give the one with adapter_config.json.\n")


def test_generate_streams_text_on_stdout_and_figures_on_stderr(
    bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--prompt", "abc", "--max-tokens", 5, "--ignore-eos", "--kv-memory", "4MiB")
    status, streamed, figures = run(capsys, "generate", bundle, *options)
    assert status == 0
    assert "3 prompt + 5 new tokens" in figures
    status, whole, figures = run(capsys, "generate", bundle, *options, "--no-stream")
    assert (status, figures) == (0, "")
    assert whole == streamed
    status, out, _ = run(capsys, "generate", bundle, *options, "--json", "--logprobs", 2)
    completion = json.loads(out)
    assert completion["text"] + "\n" == streamed
    assert completion["usage"]["completion_tokens"] == len(completion["token_ids"]) == 5
    assert len(completion["logprobs"][0]["top_logprobs"]) == 2


def test_the_same_seed_gives_the_same_text(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def text(seed: int) -> str:
        options = (
            "--max-tokens",
            20,
            "--temperature",
            1.5,
            "--seed",
            seed,
            "--kv-memory",
            "4MiB",
            "--no-stream",
        )
        return run(capsys, "generate", bundle, "--prompt", "abc", *options)[1]

    assert text(1) == text(1) != text(2)


def test_prompts_from_files(bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "p.txt").write_text("abc")
    options = ("--max-tokens", 3, "--no-stream", "--kv-memory", "4MiB")
    from_file = run(capsys, "generate", bundle, "--prompt-file", tmp_path / "p.txt", *options)
    assert from_file == run(capsys, "generate", bundle, "--prompt", "abc", *options)
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe\xff")
    status, _, err = run(capsys, "generate", bundle, "--prompt-file", tmp_path / "bad.txt", *options)
    assert status == 1
    assert "not UTF-8" in err
    (tmp_path / "m.json").write_text("[{]")
    status, _, err = run(capsys, "generate", bundle, "--messages", tmp_path / "m.json", *options)
    assert status == 1
    assert "not valid JSON" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("generate", "{none}", "--prompt", "x"), "not a bundle"),
        (("generate", "{bundle}", "--prompt", ""), "empty"),
        (("generate", "{bundle}", "--prompt", "x", "--temperature", "-1"), "temperature"),
        (("generate", "{bundle}", "--prompt", "x" * 600, "--kv-memory", "4MiB"), "600"),
        (("generate", "{bundle}", "--prompt", "x", "--kv-memory", "lots"), "'lots'"),
        (("generate", "{bundle}", "--prompt-file", "{none}/p"), "cannot read"),
        (("bench", "{bundle}", "--repeat", "0"), "--repeat is 0"),
        (("inspect", "{none}"), "not a bundle"),
        (("verify", "{none}"), "not a bundle"),
        (("export", "{none}/x", "{none}/y"), "x"),
        (("plan", "{bundle}", "--memory", "8 parsecs"), "--memory"),
    ],
)
def test_errors_are_one_line_and_status_1(
    arguments: tuple[str, ...],
    message: str,
    bundle: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    filled = [a.format(bundle=bundle, none=tmp_path) for a in arguments]
    status, out, err = run(capsys, *filled)
    assert (status, out) == (1, "")
    assert err.startswith("pagelet: ")
    assert err.count("\n") == 1
    assert message in err


@pytest.mark.parametrize("arguments", [(), ("fly",), ("generate", "b"), ("bench", "b", "--repeat", "x")])
def test_bad_usage_is_status_2(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert "usage:" in capsys.readouterr().err


def test_bench_prints_its_medians_and_runs(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--prompt-tokens", 20, "--new-tokens", 4, "--sequences", 2, "--repeat", 3, "--kv-memory", "4MiB")
    status, out, err = run(capsys, "bench", bundle, *sizes, "--json")
    assert (status, err) == (0, "")
    result = json.loads(out)
    assert len(result["runs"]) == 3
    rates = sorted(one["decode_tokens_per_second"] for one in result["runs"])
    assert result["decode_tokens_per_second"] == rates[1] > 0
    assert result["peak_rss_bytes"] > 10e6
    status, out, _ = run(capsys, "bench", bundle, *sizes)
    assert status == 0
    assert "prefill" in out


def test_inspect_and_verify(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "inspect", bundle)
    assert status == 0
    assert "2 layers" in out
    assert json.loads(run(capsys, "inspect", bundle, "--json")[1])["format"] == "pagelet-bundle"
    assert json.loads(run(capsys, "verify", bundle, "--json")[1])["ok"] is True


def test_verify_finds_a_flipped_byte_of_the_weights(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = bundle / "model.weights"
    content = bytearray(path.read_bytes())
    content[1000] ^= 1
    path.write_bytes(content)
    try:
        status, _, err = run(capsys, "verify", bundle)
        assert status == 1
        assert "model.weights" in err
    finally:
        content[1000] ^= 1
        path.write_bytes(content)


def test_the_installed_program_runs() -> None:
    program = Path(sys.executable).with_name("pagelet")
    done = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("pagelet ")
