"""The kernel variant that a process uses by default: the best one that passed its self-test on this machine.

A variant is tested in a process of its own before it is first used. The verdict is kept in a file of the cache folder until
the processor, its microcode or the compiled kernels change.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.backends.native import _native, info
from penstock.machine import cache_home, cpu_identity

_log = logging.getLogger(__name__)

SELF_TEST = (sys.executable, "-P", "-m", "penstock.backends.native.self_test")
TIMEOUT_S = 30.0
"""For a process that waits. One that computes for `MAX_CPU_S` (self_test.py) is stopped by the system."""


@dataclass(frozen=True, slots=True)
class Choice:
    variant: str
    faults: Mapping[str, str]
    """Better variants of this machine -> how they failed their self-test."""

    @property
    def words(self) -> str:
        """Describe the faults for the log; empty without any."""
        return "".join(f", not {variant}, which failed its self-test ({fault})" for variant, fault in self.faults.items())


def chosen() -> Choice:
    """Return this process's choice. The first call on a machine takes about 0.2 s."""
    return _choose_here(tuple(info()["variants"]))


@functools.cache
def _choose_here(variants: tuple[str, ...]) -> Choice:
    kernels = Path(_native.__file__).stat()
    machine = hashlib.sha256(f"{cpu_identity()} {kernels.st_size} {kernels.st_mtime_ns}".encode()).hexdigest()
    return choose(variants, cache_home() / "penstock" / "kernels", machine)


def choose(variants: Sequence[str], file: Path, machine: str, self_test: Sequence[str] = SELF_TEST) -> Choice:
    """Return the first variant without a fault. The last one is what others are compared with, and is not tested.

    - `file`: where verdicts are remembered
    - `machine`: processor and build for which they hold
    - `self_test`: the program that tests the variant of its last argument
    """
    verdicts = _remembered(file, machine)
    faults: dict[str, str] = {}
    for variant in variants[:-1]:
        fault = verdicts.get(variant)
        if fault is None:
            fault, is_final = _test(variant, self_test)
            if is_final:
                verdicts[variant] = fault
                _remember(file, machine, verdicts)
        if not fault:
            return Choice(variant, faults)
        faults[variant] = fault
    return Choice(variants[-1], faults)


def _test(variant: str, self_test: Sequence[str]) -> tuple[str, bool]:
    """Return what is wrong with a variant, or an empty string, and whether another test would find the same."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # NumPy is to start no threads
    fault, is_final, untested = "", True, ""
    try:
        run = subprocess.run(  # noqa: S603
            [*self_test, variant],
            check=False,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            env=environment,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        fault, is_final = f"no result within {TIMEOUT_S:g} s", False
    except OSError as error:
        untested = str(error)
    else:
        if run.returncode < 0:
            fault = f"ended by {signal.Signals(-run.returncode).name}"
        elif run.returncode and not (fault := run.stdout.partition("\n")[0]):
            untested = run.stderr.strip().rpartition("\n")[2] or f"exit status {run.returncode}"
    if fault:
        _log.error("The %s kernels failed their self-test on this processor and are not used: %s", variant, fault)
    if untested:
        _log.warning("The %s kernels are used without a self-test, which could not run: %s", variant, untested)
    return fault, is_final and not untested


def _remembered(file: Path, machine: str) -> dict[str, str]:
    """Return variant -> fault, empty for one that passed."""
    try:
        first, *lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return {}
    if first != machine:
        return {}
    return {variant: fault for variant, _, fault in (line.partition(" ") for line in lines)}


def _remember(file: Path, machine: str, faults: Mapping[str, str]) -> None:
    """Write a line for the machine and one for each variant, at once for whoever reads."""
    lines = [machine, *(f"{variant} {fault}" for variant, fault in faults.items())]
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, prefix=file.name, delete=False, encoding="utf-8") as new:
            new.write("\n".join(lines))
        Path(new.name).replace(file)
    except OSError as error:
        _log.debug("the verdict on the kernels is not kept: %s", error)
