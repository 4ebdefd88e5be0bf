"""ptxas: from Triton's PTX to a cubin. Which one is used depends on the driver that must load the result.

A driver loads cubins of its own major version of CUDA and of earlier ones. JetPack 6 on Orin (SM 87) has CUDA
12.6, so SM 87 is assembled by CUDA 12; JetPack 7 loads that too. For the others it is the ptxas that Triton
is tested with: of CUDA 12.9 before SM 90, of CUDA 13 from there. So Hopper with a driver of CUDA 12 needs
another one; what else there is from SM 90 has drivers of CUDA 13 (JetPack 7, TensorRT-RTX for CUDA 13).
"""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from pagelet.plugins.kernels.records import KernelError

_CUDA_12 = (87,)
_PACKAGE = "nvidia-cuda-nvcc-cu12"
_FIRST_OF_SECOND = 90  # Triton's ptxas-blackwell serves from here


class KernelCompileError(KernelError):
    """A kernel does not compile, or a tool for it is missing."""


@dataclass(frozen=True)
class Assembled:
    """
    Attributes:
        registers: 32 bit registers of a thread.
        spills: bytes of a thread, stores and loads together, that go to memory for lack of registers.
    """

    cubin: bytes
    registers: int
    spills: int


@dataclass(frozen=True)
class Assembler:
    """A ptxas.

    Attributes:
        cuda: its version, such as ``12.9``.
        build: as it names itself, such as ``V12.9.86``.
    """

    path: Path
    cuda: str
    build: str

    @classmethod
    def at(cls, path: Path) -> Assembler:
        """
        Raises:
            KernelCompileError: it does not run, or is no ptxas.
        """
        try:
            done = subprocess.run([path, "--version"], capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise KernelCompileError(f"ptxas at {path} does not run: {error}") from error
        found = re.search(r"release (\d+\.\d+), (V\S+)", done.stdout)
        if found is None:
            raise KernelCompileError(f"{path} is no ptxas: it says {done.stdout.strip()[:80]!r}")
        return cls(path, found[1], found[2])

    @property
    def name(self) -> str:
        return f"ptxas {self.build}"

    def assemble(self, ptx: str, architecture: str) -> Assembled:
        """
        Args:
            architecture: such as ``sm_89`` or ``sm_120a``.

        Raises:
            KernelCompileError: ptxas refused; the message has what it says.
        """
        with tempfile.TemporaryDirectory(prefix="pagelet-ptxas-") as folder:
            source, target = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
            source.write_text(ptx, encoding="utf-8")
            # Without debug information, which is most of a file and names this machine's paths; ptxas drops
            # it only if it is asked for too. The level is Triton 3.9's, against a bug of ptxas 13.
            options = ["-v", "--regAllocOptLevel=2", "-lineinfo", "-suppress-debug-info"]
            command = [str(self.path), *options, f"--gpu-name={architecture}", str(source), "-o", str(target)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise KernelCompileError(
                    f"{self.name} ended with {done.returncode} for {architecture}: "
                    f"{done.stderr.strip()[-2000:]}"
                )
            return Assembled(target.read_bytes(), *_resources(done.stderr))


def assembler_for(sm: int, triton_folder: Path, given: Path | None = None) -> Assembler:
    """The ptxas for a compute capability.

    Args:
        triton_folder: of Triton's package, which brings some.
        given: taken instead, if its version will do.

    Raises:
        KernelCompileError: there is none of the version that it needs.
    """
    if given is not None:
        assembler = Assembler.at(given)
        if sm in _CUDA_12 and not assembler.cuda.startswith("12."):
            raise KernelCompileError(
                f"{given} is of CUDA {assembler.cuda}, but the driver of JetPack 6 loads kernels for SM {sm} "
                f"only from CUDA 12; `pip install {_PACKAGE}` has one"
            )
        return assembler
    name = "ptxas" if sm < _FIRST_OF_SECOND else "ptxas-blackwell"
    bundled = Assembler.at(triton_folder / "backends" / "nvidia" / "bin" / name)
    if sm not in _CUDA_12 or bundled.cuda.startswith("12."):
        return bundled
    packaged = _packaged()
    if packaged is None:
        raise KernelCompileError(
            f"kernels for SM {sm} (Jetson Orin) need a ptxas of CUDA 12, as JetPack 6 loads nothing later, "
            f"and Triton brings one of CUDA {bundled.cuda}: `pip install {_PACKAGE}`"
        )
    return Assembler.at(packaged)


def _packaged() -> Path | None:
    try:
        files = importlib.metadata.files(_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    found = [Path(str(file.locate())) for file in files if file.parts[-2:] == ("bin", "ptxas")]
    return found[0] if found else None


def _resources(log: str) -> tuple[int, int]:
    """Registers and spilled bytes from what ``ptxas -v`` says of one kernel."""
    registers = re.findall(r"Used (\d+) registers", log)
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", log)
    if len(registers) != 1 or len(spills) != 2:
        raise KernelCompileError(f"ptxas -v says {log.strip()[:500]!r}, expected one kernel's resources")
    return int(registers[0]), sum(map(int, spills))
