"""The file with the experts of a mixture-of-experts model (--experts-on-disk).

The native backend writes and maps the file. The system keeps as much of it in memory as fits, and reads the rest when a token
needs it.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.config.units import format_size
from penstock.types.errors import ConfigError
from penstock.types.model_spec import ExpertsMlp

if TYPE_CHECKING:
    from penstock.deploy.blueprint import Compute
    from penstock.models.weights import LoadedModel


def check_experts(compute: Compute, model: LoadedModel) -> None:
    """Raise ConfigError if --experts-on-disk would change nothing for this model and backend."""
    if not compute.is_native:
        raise ConfigError(
            f"experts_on_disk is set, and the {compute.options.backend} backend can't keep experts in a file.",
            remedy="Leave out --experts-on-disk, or take --backend native.",
        )
    if not model.num_expert_bytes:
        raise ConfigError(
            f"experts_on_disk is set, and {model.name} is not a mixture of experts.", remedy="Leave out --experts-on-disk."
        )


def check_disk(folder: Path, model: LoadedModel) -> None:
    """Raise ConfigError if the folder's disk has no room for the experts."""
    try:
        there = next(parent for parent in (folder, *folder.parents) if parent.exists())
        free_bytes = shutil.disk_usage(there).free
    except OSError:
        return  # opening the file fails for the same cause
    if model.num_expert_bytes > free_bytes:
        needed = format_size(model.num_expert_bytes)
        raise ConfigError(
            f"The experts take {needed} in a file, and {format_size(free_bytes)} are free in {there}.",
            remedy="Free some of the disk, or name a folder on a larger one with --cache.",
        )


def disk_words(model: LoadedModel, room_bytes: int) -> str:
    """Describe the expected speed if `room_bytes` of memory are left for the experts."""
    mlps = [layer.mlp for layer in model.spec.layers if isinstance(layer.mlp, ExpertsMlp)]
    share = max(mlp.num_experts_per_token / mlp.num_experts for mlp in mlps)
    read_bytes, held = share * model.num_expert_bytes, min(1.0, max(0, room_bytes) / model.num_expert_bytes)
    words = f"experts of {format_size(model.num_expert_bytes)} on disk, of which a token reads {format_size(int(read_bytes))}"
    if held >= 1.0:
        return f"{words}; memory has room for all of them"
    rate = 1e9 / (read_bytes * (1.0 - held))  # assumes a plain SSD at 1 GB/s, easy to scale to another disk
    return (
        f"{words}; memory has room for {held:.0%}: a disk of 1 GB/s then allows about "
        f"{rate:.3g} tokens/s, or more where tokens choose some experts more often"
    )


@contextmanager
def expert_file(folder: Path | None, model: LoadedModel) -> Iterator[int | None]:
    """Yield the descriptor of a new file in the folder, or None without a folder. The file vanishes when no process maps it.

    Raises ConfigError if the disk fails, also inside the block.
    """
    if folder is None:
        yield None
        return
    check_disk(folder, model)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            yield file.fileno()
    except OSError as error:
        raise ConfigError(
            f"The experts can't be kept in a file in {folder}: {error.strerror or error}.",
            remedy="Name a folder on a disk that has room and can be written with --cache, or leave out --experts-on-disk.",
        ) from error
