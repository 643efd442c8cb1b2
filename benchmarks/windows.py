"""How many long requests run at once where every layer has a window, with and without freeing blocks before it?

    python benchmarks/windows.py [--window 4096] [--tokens 32768] [--blocks 8192] [--requests 32]

Requests of `tokens` each, prompt and answer, without a common beginning; all are there at the start. They go through the real
scheduler and KV manager to the hash executor, which checks each value that a row reads, and each answer is compared with the
oracle's. `window 0` keeps all blocks. The last line is one JSON object. The numbers do not depend on the machine.
"""

from __future__ import annotations

import argparse
import json
import sys

from penstock.testing import Driver, HashExecutor, expected_tokens, make_core, make_request, run_to_completion
from penstock.types.events import Add
from penstock.types.plan import Capacity

ANSWER_TOKENS = 512


def measure(capacity: Capacity, num_requests: int, num_tokens: int) -> dict[str, int]:
    """Requests that decode at once at most, and the steps until all have ended."""
    most = 0

    def look(driver: Driver) -> None:
        nonlocal most
        most = max(most, sum(request.num_behind == 1 for request in driver.core.scheduler.running.values()))

    core, executor = make_core(capacity), HashExecutor(capacity)
    num_prompt = num_tokens - ANSWER_TOKENS
    requests = [
        make_request(f"r{idx}", [idx] + [1 + position % 900 for position in range(num_prompt - 1)], max_tokens=ANSWER_TOKENS)
        for idx in range(num_requests)
    ]
    outcomes = run_to_completion(core, executor, *map(Add, requests), after_turn=look)
    for request in requests:
        sampling, longest = request.sampling, capacity.max_model_len
        expected = expected_tokens(request.prompt_token_ids, sampling, model=executor.model, max_model_len=longest)
        assert tuple(outcomes[request.request_id].token_ids) == expected.token_ids, "another answer than the oracle's"
    recomputed = executor.num_computed_tokens - num_requests * (num_tokens - 1)
    return {"most_decoding": most, "steps": executor.num_steps, "recomputed_tokens": recomputed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--window", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--blocks", type=int, nargs="+", default=[8192])
    parser.add_argument("--requests", type=int, default=32)
    args = parser.parse_args()
    rows: list[dict[str, int]] = []
    for num_blocks in args.blocks:
        for window in (0, args.window):
            capacity = Capacity(1 + num_blocks, 16, 64, 2048, args.tokens, window=window)
            rows.append({"blocks": num_blocks, "window": window, **measure(capacity, args.requests, args.tokens)})
            print(rows[-1], file=sys.stderr, flush=True)
    print(json.dumps({"benchmark": "windows", "tokens": args.tokens, "requests": args.requests, "runs": rows}))


if __name__ == "__main__":
    main()
