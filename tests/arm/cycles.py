"""Predict the cycles of a kernel's innermost loops on an Arm processor, by llvm-mca (`apt install llvm-22`).

    cd build/arm/cmake/CMakeFiles/kernels_neon_i8mm.dir/native/kernels
    python ../../../../../../../tests/arm/cycles.py gemm_widened.cpp.o smmla neoverse-v2

Prints each loop that has the instruction. Caches and memory are not part of the prediction.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator

ITERATIONS = 200
MCA = ("llvm-mca-22", "-mtriple=aarch64", "-mattr=+i8mm,+bf16,+dotprod", f"-iterations={ITERATIONS}")
LINE = re.compile(r"\s+([0-9a-f]+):\s+(\S+)\s*([^/]*)")
BRANCH = re.compile(r"b|b\.\w+|cbn?z|tbn?z")


def innermost_loops(path: str) -> Iterator[list[str]]:
    """Yield the instructions of each loop that has no other one inside, without branches."""
    command = ["aarch64-linux-gnu-objdump", "-d", "--no-show-raw-insn", path]
    found = [
        LINE.match(line) for line in subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    ]
    lines = [(int(match[1], 16), match[2], match[3].strip()) for match in found if match]
    # Functions of a section follow each other; an address of another section is in no loop of this one.
    loops, index_of = [], {}
    for index, (address, name, operands) in enumerate(lines):
        if index and address < lines[index - 1][0]:
            index_of = {}
        index_of[address] = index
        target = re.search(r"(?:^|, )([0-9a-f]+) <", operands)
        if BRANCH.fullmatch(name) and target and int(target[1], 16) in index_of:
            loops.append((index_of[int(target[1], 16)], index))
    for first, last in loops:
        if not any(first <= a and b <= last and (a, b) != (first, last) for a, b in loops):
            yield [
                f"{name} {operands.partition(' <')[0]}" for _, name, operands in lines[first:last] if not BRANCH.fullmatch(name)
            ]


def main(path: str, instruction: str, processor: str) -> None:
    for loop in innermost_loops(path):
        count = sum(line.split()[0] == instruction for line in loop)
        if count == 0:
            continue
        command = [*MCA, f"-mcpu={processor}"]
        told = subprocess.run(command, input="\n".join(loop), stdout=subprocess.PIPE, text=True, check=True).stdout
        cycles = int(told.partition("Total Cycles:")[2].split()[0]) / ITERATIONS
        print(f"{count} {instruction} of {len(loop)} instructions: {cycles:.1f} cycles")


if __name__ == "__main__":
    main(*sys.argv[1:])
