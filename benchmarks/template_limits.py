"""How much can a model's chat template cost the server? And how much does a normal one cost each request?

    python benchmarks/template_limits.py

Each template is rendered once, in a fresh Python with 8 GiB of address space that is ended after 30 s, while another thread of
it beats every millisecond. `gap_ms` is the longest time without a beat: what the event loop would have waited. `peak_mb` is the
most that this Python had resident beyond what it began with, `child_mb` the most of the template's own process. `request_us` is
the median of 2,000 renderings of ChatML, 30 characters, from the event loop and back. The last line printed is one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import resource
import statistics
import subprocess
import sys
import threading
import time

from penstock.deploy.off_loop import OffLoop
from penstock.text.chat import ChatTemplate
from penstock.types.errors import PenstockError

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
MESSAGES = [{"role": "user", "content": "What can a template cost a day?"}]
TEMPLATES = {
    "nested loops": "{% set l = range(3000) | list %}{% for a in l %}{% for b in l %}{% for c in l %}"
    "{% endfor %}{% endfor %}{% endfor %}",
    "center": "{{ messages[0].content.center(3000000000) }}",
    "format": "{{ '%03000000000d' % messages | length }}",
    "doubling": "{% set ns = namespace(s='x' * 9999) %}{% for i in range(18) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "constant": "{{ '%03000000000d' % 1 }}",
}
MAX_S = 30
MAX_BYTES = 8 << 30


def run_one(name: str) -> None:
    """In the fresh Python."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    begin_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    gap_s, is_over = 0.0, threading.Event()

    def beat() -> None:
        nonlocal gap_s
        last_s = time.perf_counter()
        while not is_over.wait(0.001):
            gap_s = max(gap_s, time.perf_counter() - last_s)
            last_s = time.perf_counter()

    heart = threading.Thread(target=beat)
    heart.start()
    begin_s = time.perf_counter()
    try:
        ChatTemplate(TEMPLATES[name], special_tokens={}).render(MESSAGES)
        end = "rendered"
    except PenstockError as error:
        end = error.message
    except MemoryError:
        end = "MemoryError"
    took_s = time.perf_counter() - begin_s
    is_over.set()
    heart.join()
    peak_mb = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - begin_kb) / 1e3
    child_mb = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e3
    numbers = {"s": round(took_s, 2), "gap_ms": round(gap_s * 1e3), "peak_mb": round(peak_mb), "child_mb": round(child_mb)}
    print(json.dumps(numbers | {"end": end}))


def outcome(name: str) -> dict[str, object]:
    try:
        done = subprocess.run([sys.executable, __file__, name], capture_output=True, text=True, timeout=MAX_S, check=True)
    except subprocess.TimeoutExpired:
        return {"end": f"ended after {MAX_S} s"}
    result: dict[str, object] = json.loads(done.stdout)
    return result


async def request_us() -> float:
    template, off_loop = ChatTemplate(CHATML, special_tokens={}), OffLoop()
    times_ns = []
    for _ in range(2000):
        begin_ns = time.perf_counter_ns()
        await off_loop.render("", 300, lambda: template.render(MESSAGES))
        times_ns.append(time.perf_counter_ns() - begin_ns)
    off_loop.close()
    return statistics.median(times_ns) / 1e3


def main() -> None:
    if len(sys.argv) > 1:
        run_one(sys.argv[1])
        return
    outcomes = {}
    for name in TEMPLATES:
        outcomes[name] = outcome(name)
        print(name, outcomes[name])
    begin_s = time.perf_counter()
    ChatTemplate(CHATML, special_tokens={})
    start_ms = (time.perf_counter() - begin_s) * 1e3
    numbers = {"start_ms": round(start_ms, 1), "request_us": round(asyncio.run(request_us()), 1)}
    print(json.dumps({"templates": outcomes} | numbers))


if __name__ == "__main__":
    main()
