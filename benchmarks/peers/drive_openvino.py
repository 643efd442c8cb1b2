"""OpenVINO GenAI's continuous batching in process, driven by lines of JSON. Run by `peers.py` in that peer's environment.

    python drive_openvino.py MODEL.gguf MAX_SEQS [PROPERTY=VALUE ...]

The properties are the CPU device's, such as INFERENCE_NUM_THREADS=1, or those of `SchedulerConfig`, such as
max_num_batched_tokens=2048. Prints `ready` once the model is loaded. Then each line of input is {"jobs": [[prompt, max_tokens],
...], "concurrency": n}, where a prompt is a text or a list of token ids. Each line of output is {"seconds", "replies":
[{"start_s", "token_times_s", "num_tokens", "num_prompt_tokens", "text"}, ...]}.
Imports nothing of Penstock.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import openvino
import openvino_genai as ov

CACHE_GB = 4
MAX_BATCHED_TOKENS = 512
"""Tokens of a step; its own default is 256. A prompt takes fewer steps."""


@dataclass
class Request:
    handle: Any
    start_s: float
    prompt: str | list[int]
    token_ids: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)


def read_value(text: str) -> Any:
    """A property's value: a number, `true` or `false`, or else a name."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def read_properties(words: list[str]) -> dict[str, Any]:
    """The values by name, of words NAME=VALUE."""
    return {name: read_value(value) for name, _, value in (word.partition("=") for word in words)}


def set_known(config: Any, properties: dict[str, Any]) -> dict[str, Any]:
    """Set what the configuration has a field for; the others, which are the device's."""
    of_device = {name: value for name, value in properties.items() if not hasattr(config, name)}
    for name in properties.keys() - of_device.keys():
        setattr(config, name, properties[name])
    return of_device


def make_pipeline(model: str, max_seqs: int, properties: dict[str, Any]) -> ov.ContinuousBatchingPipeline:
    config = ov.SchedulerConfig()
    config.cache_size = CACHE_GB
    config.max_num_batched_tokens = MAX_BATCHED_TOKENS
    config.max_num_seqs = max_seqs
    config.enable_prefix_caching = False
    config.dynamic_split_fuse = True
    of_device = set_known(config, properties)
    return ov.ContinuousBatchingPipeline(model, config, "CPU", of_device)


def generation_config(max_tokens: int) -> ov.GenerationConfig:
    config = ov.GenerationConfig()
    config.max_new_tokens = max_tokens
    config.ignore_eos = True
    config.do_sample = False
    config.apply_chat_template = False
    return config


def take(request: Request) -> None:
    """Move what the last step produced for this request to its record."""
    time_s = time.perf_counter()
    while request.handle.can_read():
        for output in request.handle.read().values():
            request.token_ids += output.generated_ids
            request.times_s += [time_s] * len(output.generated_ids)


def replay(pipeline: ov.ContinuousBatchingPipeline, jobs: list[tuple[str | list[int], int]], concurrency: int) -> list[Request]:
    """A closed loop: `concurrency` requests at a time, the next one as soon as one has ended."""
    requests: list[Request] = []
    running: list[Request] = []
    while running or len(requests) < len(jobs):
        while len(running) < concurrency and len(requests) < len(jobs):
            prompt, max_tokens = jobs[len(requests)]
            start_s = time.perf_counter()
            read = prompt if isinstance(prompt, str) else openvino.Tensor(np.array([prompt], np.int64))
            handle = pipeline.add_request(len(requests), read, generation_config(max_tokens))
            requests.append(Request(handle, start_s, prompt))
            running.append(requests[-1])
        pipeline.step()
        for request in running:
            take(request)
        running = [request for request in running if request.handle.get_status() == ov.GenerationStatus.RUNNING]
    return requests


def num_prompt_tokens(prompt: str | list[int], tokenizer: ov.Tokenizer) -> int:
    return tokenizer.encode(prompt, add_special_tokens=False).input_ids.shape[1] if isinstance(prompt, str) else len(prompt)


def report(requests: list[Request], tokenizer: ov.Tokenizer) -> list[dict[str, Any]]:
    return [
        {
            "start_s": request.start_s,
            "token_times_s": request.times_s,
            "num_tokens": len(request.token_ids),
            "num_prompt_tokens": num_prompt_tokens(request.prompt, tokenizer),
            "text": tokenizer.decode(request.token_ids),
        }
        for request in requests
    ]


def main() -> None:
    pipeline = make_pipeline(sys.argv[1], int(sys.argv[2]), read_properties(sys.argv[3:]))
    print("ready", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        start_s = time.perf_counter()
        requests = replay(pipeline, order["jobs"], order["concurrency"])
        seconds = time.perf_counter() - start_s
        replies = report(requests, pipeline.get_tokenizer())
        print(json.dumps({"seconds": seconds, "replies": replies}), flush=True)


if __name__ == "__main__":
    main()
