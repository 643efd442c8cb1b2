"""How much memory and time does a start with a full disk tier take? It scans the file and indexes each slot.

    python benchmarks/disk_start.py [--slots 300000]

A file of small records, 4 KiB a slot, is written to a temporary folder and read as at a start. It is in the page cache then, so
the time is that of the calls alone. The last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import tempfile
import time
from pathlib import Path

from usage import resident_bytes

from penstock.kv.tiers import Tier
from penstock.storage.block_file import FINGERPRINT_BYTES, PAGE_BYTES, BlockFile


def measure(folder: Path, num_slots: int) -> dict[str, float]:
    content = memoryview(bytes(PAGE_BYTES // 2))
    store = BlockFile(
        folder / "blocks",
        max_bytes=PAGE_BYTES * (num_slots + 1),
        content_bytes=len(content),
        fingerprint=bytes(FINGERPRINT_BYTES),
    )
    for slot in range(num_slots):
        store.write(slot, slot.to_bytes(16, "big"), content)
    before_bytes, began_s, began_cpu_s = resident_bytes(os.getpid()), time.monotonic(), time.process_time()
    tier = Tier(store.num_slots, entries=store.entries())
    took_s, took_cpu_s = time.monotonic() - began_s, time.process_time() - began_cpu_s
    assert len(tier.slots) == num_slots, "all were found"
    most_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    figures = {
        "bytes_at_most": most_bytes - before_bytes,
        "bytes_kept": resident_bytes(os.getpid()) - before_bytes,
        "us": took_s * 1e6,
        "cpu_us": took_cpu_s * 1e6,
    }
    store.close()
    return {name: round(figure / num_slots, 1) for name, figure in figures.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, default=300_000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = measure(Path(folder), args.slots)
    print(json.dumps({"benchmark": "disk_start", "slots": args.slots, "per_slot": report}))


if __name__ == "__main__":
    main()
