"""The embedders of a comparison, their settings, and how each is loaded: what `encoder_peers.py` chooses from.

Libraries run in a process of their own and are given all texts at once (`peers/embed.py`). Servers are asked over HTTP, by the
lab's client. All of them read texts of up to 512 tokens, and answer with vectors of length 1. Compares nothing.
"""

from __future__ import annotations

import base64
import json
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from contenders import LISTEN, Choices, own_files, packages
from peaks import usable_threads
from peer_setup import Environments, make_gguf, make_minilm, make_onnx
from processes import Contender, ask_worker, started
from sessions import ANSWER_TIMEOUT_S, SERVED_NAME, answered
from usage import ProcessGroup

from penstock.lab.client import SendOptions
from penstock.lab.pacing import Pace
from penstock.lab.records import Sent
from penstock.lab.target import Endpoint, Target
from penstock.lab.workload import Job, Workload

OURS = "penstock"
YARDSTICK = "sentence-transformers"
"""In float32: its vectors are those that all others are compared with."""
BODY_TEXTS = 64
LOADS = {"bodies of 64": (BODY_TEXTS, 1), "16 clients": (1, 16)}
"""Load of a server -> texts of a request, and requests at a time."""
IN_PROCESS = "in process"
Vectors = np.ndarray[tuple[int, int], np.dtype[np.float32]]


@dataclass(frozen=True, slots=True)
class Setting:
    environments: Environments
    ours: str
    """MODEL as Penstock takes it."""
    samples: Sequence[str]
    """Texts for the calibration of int8."""


class Library(ProcessGroup):
    """Embeds in its own process, by lines of JSON as `peers/embed.py` describes."""

    loads = (IN_PROCESS,)

    def seconds(self, texts: Sequence[str], load: str) -> float:
        assert load == IN_PROCESS
        return float(self._ask(texts)[0])

    def one_text_s(self, texts: Sequence[str]) -> float:
        """The median of one text after the other."""
        return statistics.median(self._ask(texts, one_by_one=True))

    def vectors(self, texts: Sequence[str]) -> Vectors:
        with tempfile.TemporaryDirectory() as folder:
            self._ask(texts, vectors=f"{folder}/vectors.npy")
            found: Vectors = np.load(f"{folder}/vectors.npy")
            return found

    def _ask(self, texts: Sequence[str], **options: object) -> list[float]:
        order = {"texts": texts, "one_by_one": False, "vectors": None, **options}
        seconds: list[float] = ask_worker(self.process, order, ANSWER_TIMEOUT_S)["seconds"]
        return seconds


class Server(ProcessGroup):
    """Embeds over HTTP (`/v1/embeddings`), vectors in base64 as OpenAI's client asks for them."""

    loads = tuple(LOADS)

    def __init__(self, process: subprocess.Popen[bytes], start_s: float, url: str) -> None:
        super().__init__(process, start_s)
        self.url = url

    def seconds(self, texts: Sequence[str], load: str) -> float:
        num_texts, concurrency = LOADS[load]
        return embed(self.url, jobs_of(texts, num_texts), Pace(concurrency=concurrency)).duration_ns / 1e9

    def one_text_s(self, texts: Sequence[str]) -> float:
        """The median of one text after the other, from the first byte sent to the last received."""
        sent = embed(self.url, jobs_of(texts, 1), Pace(concurrency=1))
        return statistics.median(one.ended_ns - one.sent_ns for one in sent.records) / 1e9

    def vectors(self, texts: Sequence[str]) -> Vectors:
        parts = (texts[k : k + BODY_TEXTS] for k in range(0, len(texts), BODY_TEXTS))
        return np.concatenate([embedded(self.url, part) for part in parts])


AS_BYTES = {"encoding_format": "base64"}


def jobs_of(texts: Sequence[str], num_texts: int) -> list[Job]:
    """Requests with `num_texts` texts each, in order, all due at once."""
    parts = [tuple(texts[k : k + num_texts]) for k in range(0, len(texts), num_texts)]
    return [Job(arrival_ns=0, num_prompt_tokens=0, num_output_tokens=1, texts=part) for part in parts]


def embed(url: str, jobs: Sequence[Job], pace: Pace, max_s: float | None = None) -> Sent:
    """Raises LoadError if a request fails. Requests that have not ended after `max_s` are not counted."""
    target = Target(url=url, model=SERVED_NAME, endpoint=Endpoint.EMBEDDINGS, stream=False, extra_body=AS_BYTES)
    return answered(Workload(name="texts", jobs=jobs), target, pace=pace, options=SendOptions(max_s=max_s))


def embedded(url: str, texts: Sequence[str]) -> Vectors:
    """The vectors of one request, in the order of its texts. Raises OSError if it is refused."""
    body: dict[str, Any] = {"model": SERVED_NAME, "input": texts, **AS_BYTES}
    request = urllib.request.Request(f"{url}/v1/embeddings", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT_S) as answer:
        data = sorted(json.load(answer)["data"], key=lambda one: one["index"])
    return np.stack([np.frombuffer(base64.b64decode(one["embedding"]), "<f4") for one in data])


Session = Library | Server


@contextmanager
def running(contender: Contender, log: Path) -> Iterator[Session]:
    """The embedder, ready, until the end of the block. Raises ContenderError with the log's end."""
    start_s = time.perf_counter()
    with started(contender, log) as (process, port):
        yield Server(process, start_s, f"http://127.0.0.1:{port}") if contender.is_server else Library(process, start_s)


def penstock(setting: Setting, options: Sequence[str]) -> Contender:
    command = [sys.executable, "-m", "penstock", "serve", setting.ours, *LISTEN, "--max-model-len", "512"]
    command += ["--served-model-name", SERVED_NAME, *options]
    return Contender(OURS, command, health="/ready", installed=own_files())


def library(engine: str, *defaults: str) -> Callable[[Setting, Sequence[str]], Contender]:
    """In process; the options are arguments of the engine's function in `peers/embed.py`, as NAME=VALUE."""

    def make(setting: Setting, options: Sequence[str]) -> Contender:
        environments = setting.environments
        folder = make_minilm(environments)
        make_onnx(environments, folder, setting.samples)
        script = Path(__file__).parent / "peers" / "embed.py"
        streams = [] if engine == YARDSTICK else [f"streams={usable_threads()}"]
        command = [environments.python("encoders"), script, engine, folder, *streams, *defaults, *options]
        return Contender(engine, command, installed=packages(environments.site_packages("encoders")))

    return make


def infinity(setting: Setting, options: Sequence[str]) -> Contender:
    environments = setting.environments
    program = environments.python("infinity").with_name("infinity_emb")
    command = [program, "v2", "--model-id", make_minilm(environments), *LISTEN]
    command += ["--served-model-name", SERVED_NAME, "--url-prefix", "/v1", "--device", "cpu", *options]
    environ = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "INFINITY_ANONYMOUS_USAGE_STATS": "0"}
    installed = packages(environments.site_packages("infinity"))
    return Contender("infinity", command, health="/health", environ=environ, installed=installed)


def llamacpp(setting: Setting, options: Sequence[str]) -> Contender:
    environments = setting.environments
    programs, model = environments.llama_programs, make_gguf(environments, make_minilm(environments))
    command = [programs / "llama-server", "-m", model, "--alias", SERVED_NAME, *LISTEN, "--embedding"]
    command += ["-np", "16", "-c", "8192", "-b", "2048", "-ub", "2048", "--poll", "0", "--no-webui"]
    command += ["-t", str(usable_threads()), *options]
    libraries = (path for path in programs.iterdir() if ".so" in path.name)
    return Contender("llamacpp", command, installed=(programs / "llama-server", *libraries))


def has_tiles() -> bool:
    """Whether the processor multiplies bf16 in tiles (AMX)."""
    return "amx_bf16" in Path("/proc/cpuinfo").read_text()


CONTENDERS: Choices = {
    OURS: ("", penstock),
    "openvino": ("encoders", library("openvino", f"precision={'bf16' if has_tiles() else 'f32'}")),
    "openvino-int8": ("encoders", library("openvino", "file=model-int8.xml")),
    "openvino-w8": ("encoders", library("openvino", "file=model-w8.xml")),
    "onnxruntime": ("encoders", library("onnxruntime")),
    "onnxruntime-int8": ("encoders", library("onnxruntime", "file=model-int8.onnx")),
    YARDSTICK: ("encoders", library("sentence-transformers")),
    f"{YARDSTICK}-bf16": ("encoders", library("sentence-transformers", "dtype=bfloat16")),
    "infinity": ("infinity", infinity),
    "llamacpp": ("llamacpp", llamacpp),
}
