"""Make a peer's model: `PYTHON convert.py STEP SOURCE OUT`, in the Python where that peer is installed.

Nothing of pagelet is imported here. Steps: huggingface, llama_cpp, openvino_gguf, openvino,
onnxruntime_genai; `versions` prints what is installed as JSON.
"""

import argparse
import ctypes
import json
import shutil
import subprocess
import sys
import tempfile
from importlib import import_module, metadata
from pathlib import Path

PACKAGES = ("llama-cpp-python", "openvino-genai", "onnxruntime-genai", "onnxruntime", "transformers", "torch")


def versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def huggingface(gguf: Path, out: Path) -> None:
    """The GGUF's dequantized weights as a Hugging Face folder in float32."""
    torch, transformers = import_module("torch"), import_module("transformers")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    # A model read from a GGUF refuses to be saved, so its weights move to a fresh one.
    config = type(loaded.config).from_dict(loaded.config.to_dict())
    config.__dict__.pop("quantization_config", None)
    fresh = type(loaded)(config)
    fresh.load_state_dict(loaded.state_dict())
    fresh.to(torch.float32).save_pretrained(out)
    transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(out)


def llama_cpp(gguf: Path, out: Path) -> None:
    """Q4_0 by its own quantizer, the other tensors' types by its own rules."""
    llama = import_module("llama_cpp")
    params = llama.llama_model_quantize_default_params()
    params.ftype = llama.LLAMA_FTYPE_MOSTLY_Q4_0
    params.allow_requantize = True
    out.mkdir()
    target = out / "q4_0.gguf"
    if llama.llama_model_quantize(str(gguf).encode(), str(target).encode(), ctypes.byref(params)):
        raise RuntimeError(f"llama.cpp could not quantize {gguf}")


def openvino_gguf(gguf: Path, out: Path) -> None:
    """The GGUF as its own reader takes it: groups of 32 with a zero point."""
    genai = import_module("openvino_genai")
    out.mkdir()
    copy = out / gguf.name  # what is read is saved beside it
    shutil.copyfile(gguf, copy)
    genai.LLMPipeline(str(copy), "CPU", enable_save_ov_model=True)
    copy.unlink()


def openvino(checkpoint: Path, out: Path) -> None:
    """INT4, symmetric, groups of 64; needs optimum-intel and nncf."""
    form = ["--weight-format", "int4", "--sym", "--group-size", "64", "--ratio", "1.0"]
    task = ["--task", "text-generation-with-past"]
    program = Path(sys.executable).with_name("optimum-cli")
    arguments = [str(program), "export", "openvino", "--model", str(checkpoint), *task, *form, str(out)]
    subprocess.run(arguments, check=True)


def onnxruntime_genai(checkpoint: Path, out: Path) -> None:
    """INT4, groups of 32, INT8 activations."""
    builder = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-p", "int4", "-e", "cpu"]
    options = ["--extra_options", "int4_block_size=32", "int4_accuracy_level=4"]
    with tempfile.TemporaryDirectory() as cache:
        files = ["-i", str(checkpoint), "-o", str(out), "-c", cache]
        subprocess.run([*builder, *files, *options], check=True)


STEPS = {step.__name__: step for step in (huggingface, llama_cpp, openvino_gguf, openvino, onnxruntime_genai)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("step", choices=["versions", *STEPS])
    parser.add_argument("source", type=Path, nargs="?")
    parser.add_argument("out", type=Path, nargs="?")
    args = parser.parse_args()
    if args.step == "versions":
        print(json.dumps(versions()))
    else:
        STEPS[args.step](args.source, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
