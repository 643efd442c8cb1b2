"""How long does KV take from one replica's cache to another's on this machine, beside a memcpy of as many bytes?

    python benchmarks/kv_transfer.py

Two processes with smollm2:135m on a thread each. One computes prompts of 4,000 tokens, the other fetches their KV, and evicts
it for that of the next. `memory, first`: it has not read these pages before. `copy alone` leaves out requesting the blocks,
hashing their tokens and adding them to the cache. Figures are medians of prompts and rounds. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

from printed import origin, table

from penstock.cluster import transfer
from penstock.cluster.messages import Source
from penstock.cluster.tap import Tap
from penstock.cluster.transfer import BlockServer, Fetcher
from penstock.config.components import config_from
from penstock.deploy.factory import locate, start_model
from penstock.deploy.resources import Resources
from penstock.deploy.running import RunningModel
from penstock.types.request import Request
from penstock.types.sampling import SamplingParams

HOST, SECRET = "127.0.0.1", b"a secret of benchmarks"
NUM_TOKENS, NUM_PROMPTS = 4_000, 4


def prompt(number: int) -> Request:
    token_ids = tuple(random.Random(number).choices(range(1_000, 40_000), k=NUM_TOKENS + 1))
    return Request(str(number), token_ids, SamplingParams(max_tokens=1), arrival_ns=0)


def start(num_prompts: float) -> tuple[RunningModel, Tap]:
    """Start a model whose cache has room for so many prompts."""
    config, tap = config_from({"threads": 1, "kv_cache_memory": round(num_prompts * NUM_TOKENS * 13_000)}), Tap()
    return start_model(config, locate(config), Resources(num_models=2), tap=tap), tap


def give(port: Connection) -> None:
    running, tap = start(NUM_PROMPTS + 1)
    for number in range(NUM_PROMPTS):
        running.engine.submit(prompt(number))
        time.sleep(0.1)
        while (load := running.engine.load()).num_waiting or load.num_running:
            time.sleep(0.1)
    server = BlockServer(lambda: tap.blocks, HOST, SECRET)
    port.send(server.port)
    port.recv()
    server.close()
    running.close()


def rounds(tap: Tap, source: Source, num_rounds: int, *, is_near: bool) -> tuple[list[list[float]], float]:
    """Return the seconds of each transfer, in rounds over the prompts, and those of a memcpy."""
    blocks, fetcher = tap.blocks, Fetcher(SECRET)
    assert blocks is not None
    assert blocks.memory is not None
    num_bytes = NUM_TOKENS // blocks.block_size * blocks.memory.block_bytes
    one, other = memoryview(bytearray(num_bytes)), memoryview(bytearray(num_bytes))
    one[:] = other
    is_here = transfer._Place.is_here
    if not is_near:
        transfer._Place.is_here = lambda _: False  # type: ignore[method-assign]
    seconds: list[list[float]] = []
    memcpy_s: list[float] = []
    for _ in range(num_rounds):
        seconds.append([])
        for number in range(NUM_PROMPTS):
            began_s = time.perf_counter()
            num_tokens = fetcher.fetch(blocks, prompt(number), source)
            seconds[-1].append(time.perf_counter() - began_s)
            assert num_tokens == NUM_TOKENS, f"only {num_tokens} tokens came"
            began_s = time.perf_counter()
            one[:] = other
            memcpy_s.append(time.perf_counter() - began_s)
    transfer._Place.is_here = is_here  # type: ignore[method-assign]
    return seconds, median(memcpy_s)


def compare(num_rounds: int) -> dict[str, float]:
    ours, theirs = multiprocessing.Pipe()
    giver = multiprocessing.get_context("spawn").Process(target=give, args=(theirs,), daemon=True)
    giver.start()
    running, tap = start(2.5)
    source = Source(HOST, ours.recv(), NUM_TOKENS)
    copy, copies_s = transfer._copy, list[float]()

    def timed(*args: Any) -> int:
        began_s = time.perf_counter()
        num_blocks = copy(*args)
        copies_s.append(time.perf_counter() - began_s)
        return num_blocks

    transfer._copy = timed
    near, memcpy_s = rounds(tap, source, num_rounds + 1, is_near=True)
    far, _ = rounds(tap, source, num_rounds, is_near=False)
    ours.send(None)
    giver.join()
    running.close()
    return {
        "memcpy": memcpy_s,
        "memory, first": median(near[0]),
        "memory": middle(near[1:]),
        "memory, copy alone": median(copies_s[NUM_PROMPTS:]),
        "TCP": middle(far),
    }


def middle(seconds: Sequence[Sequence[float]]) -> float:
    return median([one for some in seconds for one in some])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    found = compare(parser.parse_args().rounds)
    rows = [(name, f"{1e3 * seconds:.1f}", f"{seconds / found['memcpy']:.2f}") for name, seconds in found.items()]
    print(origin(f"{NUM_TOKENS} tokens"))
    print(table(("", "ms", "times a memcpy"), rows), end="\n\n")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
