"""The file in which a mixture's experts lie with --experts-on-disk: whether it makes sense and has room, and the file itself.

The factory, the memory plan and `appraisal` ask. The native backend fills the file; the system keeps in memory what it has room
for, drops the rest and reads it again when a token wants it.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.config import Backend, Config
from penstock.config.units import format_size
from penstock.types.errors import ConfigError
from penstock.types.model_spec import ExpertsMlp

if TYPE_CHECKING:
    from penstock.models.weights import LoadedModel

ASSUMED_DISK_BYTES_PER_S = 1e9
"""Reading rate of a plain solid-state disk, for a figure that everyone can scale to theirs."""


def disk_bytes(config: Config, model: LoadedModel) -> int:
    """Weights that lie in a file and not in memory."""
    return model.num_expert_bytes if config.model.experts_on_disk else 0


def check_experts(config: Config, model: LoadedModel) -> None:
    """Refuse a setting that changes nothing. Raises ConfigError."""
    if not config.model.experts_on_disk:
        return
    if config.backend.backend != Backend.NATIVE:
        raise ConfigError(
            f"experts_on_disk is set, and the {config.backend.backend} backend keeps no experts in a file.",
            remedy="Leave out --experts-on-disk, or take --backend native.",
        )
    if not model.num_expert_bytes:
        raise ConfigError(
            f"experts_on_disk is set, and {model.name} is no mixture of experts.", remedy="Leave out --experts-on-disk."
        )


def check_disk(config: Config, model: LoadedModel) -> None:
    """Refuse a setting that changes nothing (`check_experts`), and a disk without room. Raises ConfigError."""
    check_experts(config, model)
    if not config.model.experts_on_disk:
        return
    folder = _folder(config)
    try:
        there = next(parent for parent in (folder, *folder.parents) if parent.exists())
        free_bytes = shutil.disk_usage(there).free
    except OSError:
        return  # opening the file tells the same with its cause
    if model.num_expert_bytes > free_bytes:
        needed = format_size(model.num_expert_bytes)
        raise ConfigError(
            f"The experts take {needed} in a file, and {format_size(free_bytes)} are free in {there}.",
            remedy="Free some of the disk, or name a folder on a larger one with --cache.",
        )


def disk_words(model: LoadedModel, room_bytes: int) -> str:
    """Sentence on what to expect when memory has so much room for the experts."""
    mlps = [layer.mlp for layer in model.spec.layers if isinstance(layer.mlp, ExpertsMlp)]
    share = max(mlp.num_experts_per_token / mlp.num_experts for mlp in mlps)
    read_bytes, held = share * model.num_expert_bytes, min(1.0, max(0, room_bytes) / model.num_expert_bytes)
    words = f"experts of {format_size(model.num_expert_bytes)} on disk, of which a token reads {format_size(int(read_bytes))}"
    if held >= 1.0:
        return f"{words}; memory has room for all of them"
    rate = ASSUMED_DISK_BYTES_PER_S / (read_bytes * (1.0 - held))
    return (
        f"{words}; memory has room for {held:.0%}: a disk of {ASSUMED_DISK_BYTES_PER_S / 1e9:g} GB/s then allows about "
        f"{rate:.3g} tokens/s, or more where tokens choose some experts more often"
    )


@contextmanager
def expert_file(config: Config, model: LoadedModel) -> Iterator[int | None]:
    """A nameless empty file for the experts, which goes when nobody has it mapped any more; None if they stay in memory.

    Raises ConfigError for what the disk refuses, in the block, too.
    """
    if not config.model.experts_on_disk:
        yield None
        return
    check_disk(config, model)
    folder = _folder(config)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            yield file.fileno()
    except OSError as error:
        raise ConfigError(
            f"The experts can't be kept in a file in {folder}: {error.strerror or error}.",
            remedy="Name a folder on a disk that has room and can be written with --cache, or leave out --experts-on-disk.",
        ) from error


def _folder(config: Config) -> Path:
    from penstock.models.catalog import cache_dir

    return cache_dir(config.model.cache_dir) / "experts"
