"""Compares the reference backend's beam searches over the default model with the golden ones. Needs no torch; takes a minute.

    python -m tests.parity.full_beams

Exit code 1 if a search whose margin is clear finds anything else.
"""

from __future__ import annotations

import sys

from support.parity.beam_cases import load
from support.parity.beams import search
from support.parity.executors import find_model, open_executor

CLEAR_MARGIN = 0.01
"""Sums of log-probabilities; keys and values are rounded to 16 bits here, and not in the golden searches."""


def main() -> int:
    cases = load("default")
    with open_executor("reference", find_model(), num_tokens=4000) as executor:
        found = search(executor, cases)
    num_wrong = 0
    for case, own in zip(cases, found, strict=True):
        is_equal, is_clear = own == case.hypotheses, case.margin > CLEAR_MARGIN
        num_wrong += is_clear and not is_equal
        words = f"{'equal' if is_equal else 'other'}{'' if is_clear else ', not clear'}"
        print(f"width {case.width}, margin {case.margin}: {words}")
    num_equal = sum(own == case.hypotheses for case, own in zip(cases, found, strict=True))
    print(f"{num_equal} of {len(cases)} equal; {num_wrong} of {sum(c.margin > CLEAR_MARGIN for c in cases)} clear ones differ")
    return min(1, num_wrong)


if __name__ == "__main__":
    sys.exit(main())
