"""The kernel variant that a process uses by default: the best one of this machine that did not fail its self-test.

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
from penstock.machine import cpu_identity
from penstock.models.cache import default_cache_dir
from penstock.types.errors import ConfigError

_log = logging.getLogger(__name__)

SELF_TEST = (sys.executable or "python3", "-P", "-m", "penstock.backends.native.self_test")
TIMEOUT_S = 30.0
"""Wall-clock limit of a self-test. `self_test.MAX_CPU_S` limits its CPU time."""
FAULTS = (signal.SIGILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGABRT, signal.SIGXCPU)
"""Signals that count as kernel faults after `ready`. Other signals come from outside."""
KEPT_VARIABLES = ("HOME", "LD_LIBRARY_PATH", "PATH", "PYTHONHOME", "PYTHONNOUSERSITE", "PYTHONPATH", "PYTHONUSERBASE")
"""Environment variables that Python may need to find the package. Others, such as API keys, are withheld."""


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
    machine = hashlib.sha256(cpu_identity().encode() + Path(_native.__file__).read_bytes()).hexdigest()
    try:
        file = default_cache_dir() / "kernels"
    except ConfigError:
        file = None
    return choose(variants, file, machine)


def choose(variants: Sequence[str], file: Path | None, machine: str, self_test: Sequence[str] = SELF_TEST) -> Choice:
    """Return the first variant without a fault. The last one, the reference for the others, is not tested.

    - `file`: where verdicts are kept; None: nowhere
    - `machine`: identifies the processor and build
    - `self_test`: command line; the variant is appended to it
    """
    verdicts = _read(file, machine) if file else {}
    faults: dict[str, str] = {}
    for variant in variants[:-1]:
        fault = verdicts.get(variant)
        if fault is None and (fault := _test(variant, self_test)) is not None:
            verdicts[variant] = fault
            is_kept = file is not None and _write(file, machine, verdicts)
            if fault:
                _log.error(
                    "The %s kernels failed their self-test on this processor (%s), so others are used. --kernels %s uses them "
                    "all the same%s.",
                    variant,
                    fault,
                    variant,
                    f"; to test again, delete {file}" if is_kept else "",
                )
        if not fault:
            return Choice(variant, faults)
        faults[variant] = fault
    return Choice(variants[-1], faults)


def _test(variant: str, self_test: Sequence[str]) -> str | None:
    """Return the variant's fault, empty if it passed, or None if the test could not run."""
    environment = {name: value for name, value in os.environ.items() if name in KEPT_VARIABLES}
    # NumPy must not start threads. Ctrl-C in a terminal must reach only the server.
    environment["OPENBLAS_NUM_THREADS"] = "1"
    try:
        run = subprocess.run(  # noqa: S603
            [*self_test, variant],
            check=False,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=TIMEOUT_S,
            env=environment,
            stdin=subprocess.DEVNULL,
            process_group=0,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        cause = str(error)
    else:
        verdict, _, fault = run.stdout.rstrip().rpartition("\n")[2].partition(" ")
        if verdict == "passed":
            return ""
        if verdict == "failed":
            return fault
        if verdict == "ready" and -run.returncode in FAULTS:
            return f"ended by {signal.Signals(-run.returncode).name}"
        cause = run.stderr.strip().rpartition("\n")[2] or f"it ended with status {run.returncode} and no verdict"
    _log.warning("The %s kernels are used without their self-test, which could not run: %s", variant, cause)
    return None


def _read(file: Path, machine: str) -> dict[str, str]:
    """Return variant -> fault, empty for one that passed."""
    try:
        first, *lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return {}
    if first != machine:
        return {}
    return {variant: fault for variant, _, fault in (line.partition(" ") for line in lines)}


def _write(file: Path, machine: str, faults: Mapping[str, str]) -> bool:
    """Write a line for the machine and one for each variant. Another process reads the old file or the new one."""
    lines = [machine, *(f"{variant} {fault}" for variant, fault in faults.items())]
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, prefix=file.name, delete=False, encoding="utf-8") as new:
            try:
                new.write("\n".join(lines))
                new.flush()
                Path(new.name).chmod(0o644)  # other users of a shared cache read it
                Path(new.name).replace(file)
            except OSError:
                Path(new.name).unlink(missing_ok=True)
                raise
    except OSError as error:
        _log.debug("the verdict on the kernels is not kept: %s", error)
        return False
    return True
