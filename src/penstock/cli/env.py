"""`penstock env`: what a bug report needs to say about machine and installation. Changes nothing, needs no model."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from penstock import __version__
from penstock.cli.options import config_file_option, setting_option, warn_of_unknown_variables

if TYPE_CHECKING:
    from penstock.machine import Cores


@click.command()
@click.option("--cache", envvar="PENSTOCK_CACHE", metavar="PATH", help="Folder for fetched weights.")
@setting_option("threads")
@setting_option("kernels")
@config_file_option
def env(cache: str | None, threads: int | None, kernels: str | None) -> None:
    """Show the machine, the threads and the instruction set that serve would take here, versions, and what is missing."""
    warn_of_unknown_variables()
    for name, value in _facts(cache, threads, kernels):
        print(f"{name:12} {value}")


def _facts(cache: str | None, threads: int | None, kernels: str | None) -> Iterator[tuple[str, str]]:
    from penstock.config.units import format_size
    from penstock.deploy.device import gpu_facts
    from penstock.machine import available_memory_bytes, cpu_name, find_cores, usable_cpus
    from penstock.types.errors import counted

    yield "penstock", __version__
    yield "python", f"{platform.python_version()} ({sys.executable})"
    yield "system", f"{platform.system()} {platform.release()} {platform.machine()}"
    yield "processor", f"{cpu_name() or platform.machine()}, {counted(usable_cpus(), 'CPU')} usable"
    cores = find_cores()
    default = f"{cores.num_threads} by default: {cores.why}"
    yield "threads", f"{threads}{_set_by('threads')}; {default}" if threads else f"{default} (--threads sets another number)"
    yield "memory", f"{format_size(available_memory_bytes())} available"
    yield "nodes", _nodes(cores)
    yield "kernels", _kernels(kernels)
    yield "gpu", gpu_facts()
    yield "libraries", ", ".join(f"{name} {version}" for name, version in _requirements() if version)
    yield "cache", _cache(cache)
    yield "missing", "; ".join(_missing(cache)) or "nothing"


def _set_by(key: str) -> str:
    """Where the value of a setting comes from that was set."""
    names: dict[ParameterSource | None, str] = {
        ParameterSource.ENVIRONMENT: f"PENSTOCK_{key.upper()}",
        ParameterSource.DEFAULT_MAP: "the settings file",
    }
    return f", set by {names.get(click.get_current_context().get_parameter_source(key), f'--{key}')}"


def _kernels(chosen: str | None) -> str:
    """The native module's own account, or why it can't be used."""
    try:
        from penstock.backends import native

        info = native.info()
    except ImportError as error:
        return f"not usable: {error}"
    without = f"; not the processor's tiles (AMX): {info['why_no_tiles']}" if info["why_no_tiles"] else ""
    refused = "" if chosen is None or chosen in info["variants"] else ", which this machine can't run"
    taken = f"{chosen}{_set_by('kernels')}{refused}" if chosen else info["variant"]
    return f"{taken}; usable: {', '.join(info['variants'])}{without}"


def _nodes(cores: Cores) -> str:
    """The memory nodes, and whether weights are spread over several, which only the native module can tell."""
    from penstock.deploy.device import memory_facts

    try:
        return memory_facts(cores)
    except ImportError as error:
        return f"not known: {error}"


def _requirements(*, extra: str = "") -> list[tuple[str, str | None]]:
    """(name, installed version or None) of what Penstock, or one of its extras, asks for."""
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
    from penstock.models.catalog import cache_dir, list_models

    folder = cache_dir(cache)
    here = [listing.name for listing in list_models(folder) if listing.is_present]
    return f"{folder} ({', '.join(here) or 'no models'})"


def _missing(cache: str | None) -> Iterator[str]:
    from penstock.deploy.device import missing_gpu_packages
    from penstock.models.catalog import DEFAULT_MODEL, cache_dir, resolve

    if not resolve(DEFAULT_MODEL, cache_dir(cache)).is_present:
        yield f"the default model ({DEFAULT_MODEL}): `penstock pull`"
    for name, version in _requirements():
        if version is None:
            yield f"{name}: reinstall Penstock"
    for name, version in _requirements(extra="hf"):
        if version is None:
            yield f"{name}, for hf:org/repo models: `pip install '.[hf]'` in the source folder"
    if (packages := missing_gpu_packages()) is not None:
        yield packages
