"""How fast does Penstock embed over HTTP, beside other servers and beside libraries in process? Same texts, same machine.

All contenders run at once, each in a process of its own, and are loaded one after the other: libraries with all texts of a set,
servers with bodies of 64 texts, one at a time, and with 16 clients of one text each. Every second round goes backwards. Each
embeds a set once before the first round; quality is its lowest cosine with sentence-transformers in float32.
Figures are medians of the rounds and their range; in bold Penstock's rate over the contender's, the median of the rounds'
ratios: with bodies of 64 against a library, with the same load against a server. A figure during which others had more than 5 %
of the processors is measured again, or left out.

    python benchmarks/encoder_peers.py --setup   # makes what is missing in build/peers (gigabytes; many minutes), then measures
    python benchmarks/encoder_peers.py --sets short --peers penstock openvino "openvino streams=1 batch=8" --repeat 9
    python benchmarks/encoder_peers.py --save build/rounds.jsonl   # adds rounds to earlier ones; --repeat 0 prints them again

Needs the ShareGPT trace (`workloads.py`), and what `peers.py` needs for llama.cpp. A peer that is missing or fails is left out.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from contenders import prepared
from encoder_contenders import CONTENDERS, YARDSTICK, Setting, Vectors, running
from encoder_rounds import MOST_OTHERS, Comparison, printed
from encoder_texts import SETS, TextSet, read_sets
from peaks import KINDS, PeakMeter, usable_threads
from peer_setup import Environments, make_minilm
from peers import ENVIRONMENTS
from printed import origin
from processes import ContenderError
from sessions import LoadError
from workloads import DEFAULT_TRACES

from penstock.backends.native._native import usable_variants

NUM_SAMPLES = 200


def yardsticks(setting: Setting, folder: Path, sets: Sequence[TextSet]) -> dict[str, Vectors]:
    """The vectors of sentence-transformers in float32; computed once for the same texts."""
    paths = {of.name: folder / f"vectors-{of.digest}.npy" for of in sets}
    if missing := [of for of in sets if not paths[of.name].exists()]:
        for contender in prepared([YARDSTICK], setting, setup=False, choices=CONTENDERS):
            with running(contender, setting.environments.log("yardstick")) as session:
                for of in missing:
                    np.save(paths[of.name], session.vectors(of.texts))
    return {name: np.load(path) for name, path in paths.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", nargs="*", default=list(CONTENDERS), help=", ".join(CONTENDERS))
    parser.add_argument("--setup", action="store_true", help="make the environments that are missing")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--share", type=int, default=1, metavar="N", help="only every N-th text (default: all)")
    parser.add_argument("--model", default="minilm", help="MODEL of Penstock (default: %(default)s)")
    parser.add_argument("--traces", type=Path, default=DEFAULT_TRACES, help="folder of the traces (default: ../shared/traces)")
    parser.add_argument("--repeat", type=int, default=5, help="rounds (default: %(default)s)")
    parser.add_argument("--save", type=Path, metavar="FILE", help="a file of JSON lines to which the figures are added")
    others = "of the processors, beside which a figure counts for nothing (default: %(default)s)"
    parser.add_argument("--most-others", type=float, default=MOST_OTHERS, metavar="SHARE", help=others)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the contenders are stopped, too
    environments = Environments(ENVIRONMENTS)
    if args.setup:
        environments.make("encoders")
    folder = make_minilm(environments)
    found = read_sets(folder / "tokenizer.json", args.traces, share=args.share)
    sets = [found[name] for name in args.sets]
    setting = Setting(environments, args.model, found["mixed"].texts[:NUM_SAMPLES])
    meter = PeakMeter(usable_threads(), usable_variants()[0])
    meter.sample(KINDS)
    comparison = Comparison(sets, yardsticks(setting, folder, sets) if args.repeat else {}, args.save, args.most_others)
    with ExitStack() as stack:
        for contender in prepared(args.peers if args.repeat else [], setting, setup=args.setup, choices=CONTENDERS):
            log = environments.log("-".join(contender.name.replace("/", "-").split()))
            try:
                comparison.add(contender.name, stack.enter_context(running(contender, log)))
            except (ContenderError, LoadError, OSError, ValueError) as error:
                print(f"{contender.name} failed: {error}", flush=True)
        for turn in range(args.repeat):
            for of in sets:
                name = f"{time.time():.0f}"
                for peer in list(comparison.sessions)[:: -1 if turn % 2 else 1]:
                    comparison.measure(peer, name, of)
                    meter.sample(KINDS, repeat=1)
    peaks = [f"{kind} {meter.best(kind):.0f} ({meter.median(kind):.0f})" for kind in KINDS if meter.best(kind) > 0]
    print(origin(*map(str, sets), f"GOP/s of the machine, best (median): {', '.join(peaks)}"))
    print(printed(comparison.rows, args.sets))


if __name__ == "__main__":
    main()
