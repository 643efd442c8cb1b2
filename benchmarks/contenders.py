"""The contenders of a comparison and their settings: the table that `peers.py` chooses from. Starts nothing.

The settings are each program's own for serving many, with caches of earlier prompts off everywhere.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path

from installed import distribution_files, without_byte_code
from peer_setup import Environments, make_bf16_directory, make_requantized
from sessions import SERVED_NAME, Contender

OURS = "penstock"


@dataclass(frozen=True, slots=True)
class Setting:
    """The work that every contender is given."""

    environments: Environments
    gguf: Path
    llama_quantization: str | None
    max_seqs: int
    max_tokens: int
    """Prompt and reply of the longest job, rounded up."""
    num_cpus: int


def penstock(setting: Setting, *options: str, name: str = OURS) -> Contender:
    words = ["-m", "penstock", "serve", setting.gguf, "--host", "127.0.0.1", "--port", "{port}", "--no-prefix-caching"]
    words += ["--served-model-name", SERVED_NAME, *options]
    return Contender(name, [sys.executable, *words], health="/ready", installed=own_files())


def penstock_kv_bf16(setting: Setting) -> Contender:
    """With keys and values of 16 bits, as vLLM and llama.cpp have them by default."""
    return penstock(setting, "--kv-cache-dtype", "bf16", name="penstock-kv-bf16")


OPENVINO_PROPERTIES: Mapping[str, tuple[str, ...]] = {
    "openvino": (),
    "openvino-1-thread": ("INFERENCE_NUM_THREADS=1",),
    "openvino-unpinned": ("ENABLE_CPU_PINNING=false",),
    "openvino-static": ("TBB_PARTITIONER=STATIC",),
    "openvino-throughput": ("PERFORMANCE_HINT=THROUGHPUT",),
    "openvino-f32": ("INFERENCE_PRECISION_HINT=f32",),
    "openvino-256": ("max_num_batched_tokens=256",),
    "openvino-2048": ("max_num_batched_tokens=2048",),
    "openvino-kv-bf16": ("KV_CACHE_PRECISION=bf16",),
}
"""OpenVINO's own defaults, and what else might suit it better: `peers.py --peers openvino openvino-f32` compares them.

One setting of `openvino` is not its default: up to 512 tokens a step (`MAX_BATCHED_TOKENS` in `drive_openvino.py`) instead of
256, as the comparison was specified; fewer steps for a prompt. `openvino-256` has the default.
"""


def openvino(setting: Setting, name: str = "openvino") -> Contender:
    script = Path(__file__).parent / "peers" / "drive_openvino.py"
    command = [setting.environments.python("openvino"), script, setting.gguf, str(setting.max_seqs)]
    command += OPENVINO_PROPERTIES[name]
    return Contender(name, command, installed=packages(setting.environments.site_packages("openvino")))


def vllm(setting: Setting) -> Contender:
    """Its own defaults, which keep one core for the HTTP side."""
    environments = setting.environments
    folder = make_bf16_directory(environments, setting.gguf)
    command = [environments.python("vllm").with_name("vllm"), "serve", folder, "--served-model-name", SERVED_NAME]
    command += ["--host", "127.0.0.1", "--port", "{port}", "--dtype", "bfloat16", "--max-model-len", "2048"]
    command += ["--max-num-seqs", "64", "--no-enable-prefix-caching"]
    environ = {
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(environments.root / "cache" / "vllm"),
        "HF_HUB_OFFLINE": "1",
    }
    return Contender("vllm", command, environ=environ, installed=packages(environments.site_packages("vllm")))


def vllm_all_cores(setting: Setting) -> Contender:
    """vLLM computing on every core, with Intel's OpenMP as its manual recommends."""
    default = vllm(setting)
    openmp = setting.environments.root / "vllm" / "lib" / "libiomp5.so"
    environ = {**default.environ, "VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}
    return replace(default, name="vllm-all-cores", environ=environ | ({"LD_PRELOAD": str(openmp)} if openmp.exists() else {}))


def llamacpp(setting: Setting) -> Contender:
    """`--poll 0`: its spinning threads starve the HTTP side on few cores. Caches of earlier prompts are off, as everywhere."""
    environments, gguf = setting.environments, setting.gguf
    if setting.llama_quantization:
        gguf = make_requantized(environments, gguf, setting.llama_quantization)
    programs = environments.llama_programs
    command = [
        programs / "llama-server",
        "-m",
        gguf,
        "--alias",
        SERVED_NAME,
        "--host",
        "127.0.0.1",
        "--port",
        "{port}",
    ]
    command += ["-np", str(setting.max_seqs), "-c", str(setting.max_seqs * setting.max_tokens), "-t", str(setting.num_cpus)]
    command += ["-fa", "on", "--no-kv-unified", "--poll", "0", "--no-cache-prompt", "--cache-ram", "0", "--no-webui"]
    libraries = (path for path in programs.iterdir() if ".so" in path.name)
    return Contender("llamacpp", command, installed=(programs / "llama-server", *libraries))


def llamacpp_kv_q8(setting: Setting) -> Contender:
    """With keys and values of 8 bits, as Penstock and OpenVINO have them by default."""
    default = llamacpp(setting)
    return replace(default, name="llamacpp-kv-q8", command=[*default.command, "-ctk", "q8_0", "-ctv", "q8_0"])


CONTENDERS: Mapping[str, tuple[str | None, Callable[[Setting], Contender]]] = {
    OURS: (None, penstock),
    "penstock-kv-bf16": (None, penstock_kv_bf16),
    **{name: ("openvino", partial(openvino, name=name)) for name in OPENVINO_PROPERTIES},
    "vllm": ("vllm", vllm),
    "vllm-all-cores": ("vllm", vllm_all_cores),
    "llamacpp": ("llamacpp", llamacpp),
    "llamacpp-kv-q8": ("llamacpp", llamacpp_kv_q8),
}
"""Name: the environment that it needs, and how it is run."""
DEFAULT_CONTENDERS = (OURS, "openvino", "vllm", "llamacpp")


def packages(site_packages: Path) -> tuple[Path, ...]:
    """The packages of an environment, without those that every environment has."""
    return tuple(
        p for p in site_packages.iterdir() if not p.name.startswith(("pip", "setuptools", "pkg_resources", "_distutils"))
    )


def own_files() -> tuple[Path, ...]:
    """The package itself and the files of all distributions that it needs at run time."""
    return without_byte_code(chain.from_iterable(distribution_files().values()))
