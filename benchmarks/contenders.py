"""The servers and models of a comparison, and their settings: the tables that `peers.py` chooses from. Starts nothing.

The settings are each program's own for serving many, with caches of earlier prompts off everywhere.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from installed import distribution_files, without_byte_code
from peaks import usable_threads
from peer_setup import RECIPES, Environments, SetupError, make_awq_directory, make_bf16_directory, make_requantized
from processes import Contender
from sessions import SERVED_NAME
from workloads import LONG

from penstock.lab.workload import Job

OURS = "penstock"
CONTEXT_STEP = 256
LISTEN = ("--host", "127.0.0.1", "--port", "{port}")


@dataclass(frozen=True, slots=True)
class Model:
    """A model that is compared, and its load."""

    file: str
    """MODEL as Penstock takes it, unless `--model-file` says another."""
    llama_quantization: str | None
    """The file that llama.cpp gets instead of this one, where it has no fast kernel for that."""
    usual_loads: Mapping[int, int]
    """Number of requests for each concurrency."""
    long_loads: Mapping[int, int]
    """Likewise, of long prompts."""
    max_prompt_tokens: int
    max_reply_tokens: int

    def loads(self, workload: str) -> Mapping[int, int]:
        return self.long_loads if workload == LONG else self.usual_loads


MODELS = {
    "smollm2": Model("smollm2:135m", "Q4_0", {32: 96, 8: 32, 1: 8}, {8: 32}, 512, 200),
    "qwen": Model("qwen2.5-coder:1.5b", None, {16: 24, 1: 8}, {8: 8}, 256, 64),
}


@dataclass(frozen=True, slots=True)
class Setting:
    """The work that every contender is given."""

    environments: Environments
    gguf: Path
    model: Model
    loads: Mapping[int, int]
    jobs: Sequence[Job]

    @property
    def max_seqs(self) -> int:
        return max(self.loads)

    @property
    def max_tokens(self) -> int:
        """Prompt and reply of the longest job, rounded up."""
        longest = max(job.num_prompt_tokens + job.num_output_tokens for job in self.jobs)
        return -(-(longest + 1) // CONTEXT_STEP) * CONTEXT_STEP


def penstock(setting: Setting, options: Sequence[str]) -> Contender:
    command = [sys.executable, "-m", "penstock", "serve", setting.gguf, *LISTEN, "--no-prefix-caching"]
    command += ["--served-model-name", SERVED_NAME, *options]
    return Contender(OURS, command, health="/ready", installed=own_files())


def openvino(setting: Setting, options: Sequence[str]) -> Contender:
    """Its own defaults but for one: up to 512 tokens a step (`MAX_BATCHED_TOKENS` in `drive_openvino.py`) instead of 256."""
    script = Path(__file__).parent / "peers" / "drive_openvino.py"
    command = [setting.environments.python("openvino"), script, setting.gguf, str(setting.max_seqs), *options]
    return Contender("openvino", command, installed=packages(setting.environments.site_packages("openvino")))


def vllm(setting: Setting, options: Sequence[str]) -> Contender:
    """Its own defaults, which keep one core for the HTTP side.

    Options: `awq` for weights of 4 bits, which are multiplied with activations of 8; its environment's, as NAME=VALUE; its own.
    """
    environments = setting.environments
    make = make_awq_directory if "awq" in options else make_bf16_directory
    folder = make(environments, setting.gguf)
    command = [environments.python("vllm").with_name("vllm"), "serve", folder, "--served-model-name", SERVED_NAME, *LISTEN]
    command += ["--dtype", "bfloat16", "--max-num-seqs", "64", "--no-enable-prefix-caching"]
    variables = [option for option in options if re.match("[A-Z_]+=", option)]
    command += ["--max-model-len", str(setting.max_tokens)]
    command += [option for option in options if option not in ("awq", *variables)]
    environ = {
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(environments.root / "cache" / "vllm"),
        "HF_HUB_OFFLINE": "1",
        **dict(variable.split("=", 1) for variable in variables),
    }
    return Contender("vllm", command, environ=environ, installed=packages(environments.site_packages("vllm")))


def llamacpp(setting: Setting, options: Sequence[str]) -> Contender:
    """`--poll 0`: its spinning threads starve the HTTP side on few cores."""
    environments, gguf = setting.environments, setting.gguf
    if setting.model.llama_quantization:
        gguf = make_requantized(environments, gguf, setting.model.llama_quantization)
    programs = environments.llama_programs
    command = [programs / "llama-server", "-m", gguf, "--alias", SERVED_NAME, *LISTEN, "-np", str(setting.max_seqs)]
    command += ["-c", str(setting.max_seqs * setting.max_tokens), "-t", str(usable_threads()), "-fa", "on", "--poll", "0"]
    command += ["--no-kv-unified", "--no-cache-prompt", "--cache-ram", "0", "--no-webui", *options]
    libraries = (path for path in programs.iterdir() if ".so" in path.name)
    return Contender("llamacpp", command, installed=(programs / "llama-server", *libraries))


Choices = Mapping[str, tuple[str, Callable[[Any, Sequence[str]], Contender]]]
"""Name -> the environment that it needs, and what makes it of a setting and its options."""
CONTENDERS: Choices = {
    OURS: ("", penstock),
    "openvino": ("openvino", openvino),
    "vllm": ("vllm", vllm),
    "llamacpp": ("llamacpp", llamacpp),
}


def prepared(peers: Sequence[str], setting: Any, *, setup: bool, choices: Choices = CONTENDERS) -> Iterator[Contender]:
    """The contenders that can run here, each called as it was asked for. Says why others are left out."""
    environments: Environments = setting.environments
    for peer in peers:
        name, *options = peer.split()
        try:
            if name not in choices:
                raise SetupError(f"there are {', '.join(choices)}")
            needed, make = choices[name]
            if needed and setup:
                environments.make(needed)
            if needed and not environments.is_made(needed):
                raise SetupError(f"{RECIPES[needed][0]} is not in {environments.root}; make it with --setup")
            yield replace(make(setting, options), name=peer)
        except SetupError as error:
            print(f"{peer} is left out: {error}", flush=True)


def packages(site_packages: Path) -> tuple[Path, ...]:
    """The packages of an environment, without those that every environment has."""
    return tuple(
        p for p in site_packages.iterdir() if not p.name.startswith(("pip", "setuptools", "pkg_resources", "_distutils"))
    )


def own_files() -> tuple[Path, ...]:
    """The package itself and the files of all distributions that it needs at run time."""
    return without_byte_code(chain.from_iterable(distribution_files().values()))
