"""The file with a model's packed weights: its path, the identity that makes it valid, and whether a start uses it.

Only `penstock pack` writes the file, so that servers do not fill disks. Every start looks for it.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from penstock import __version__
from penstock.config.units import format_size
from penstock.types.adapter import MergedAdapter

if TYPE_CHECKING:
    from penstock.models.packed_file import PackedFile

_log = logging.getLogger(__name__)
_Executor = TypeVar("_Executor")


@dataclass(frozen=True, slots=True)
class PackedWeights:
    folder: Path
    model: Path
    adapters: tuple[MergedAdapter, ...]
    """Adapters that are merged into the weights."""
    weight_dtype: str | None
    task: str
    """The model's task. More weights are rounded for tasks that only read texts."""

    @property
    def path(self) -> Path:
        """The file's path, which depends on the model, the merged adapters, the weight type and the task."""
        adapters = [(str(Path(adapter.path).resolve()), adapter.weight) for adapter in self.adapters]
        parts = repr([str(self.model.resolve()), adapters, self.weight_dtype, self.task])
        return self.folder / f"{self._name}-{blake2b(parts.encode(), digest_size=4).hexdigest()}.packed"

    @property
    def _name(self) -> str:
        return re.sub(r"[^\w.-]", "_", self.model.stem, flags=re.ASCII)[:100]  # as many bytes

    def find_other(self) -> Path | None:
        """Return the packed weights of a model with the same name, made from another folder or with other settings, or None."""
        return min(self.folder.glob(f"{self._name}-{'?' * 8}.packed"), default=None)

    def identity(self) -> dict[str, str]:
        """Return the version, hashes and settings of a valid file. Raises PackedError if the model's files can't be read."""
        from penstock.models.load import fingerprint
        from penstock.models.packed_file import LAYOUT, PackedError

        try:
            weights = fingerprint(self.model).hex()
            adapters = [f"{fingerprint(Path(adapter.path)).hex()} x {adapter.weight!r}" for adapter in self.adapters]
        except OSError as error:
            remedy = "Make all files in the model's folder readable, or move this one away."
            raise PackedError(f"{error.filename or self.model} can't be read: {error.strerror}.", remedy=remedy) from error
        return {
            "version": f"{__version__}, layout {LAYOUT}",
            "weights": weights,
            "adapter": ", ".join(adapters) or "none",
            "weight_dtype": self.weight_dtype or "the default",
            "task": self.task,
        }

    def open(self, *, is_checked: bool = False) -> AbstractContextManager[PackedFile]:
        """Open the file, as `open_packed` does. Raises FileNotFoundError, and PackedError if it can't be used."""
        from penstock.models.packed_file import open_packed

        return open_packed(self.path, self.identity, is_checked=is_checked)


def make_with_packed(
    packed: PackedWeights, make: Callable[[PackedFile | None], _Executor], *, is_of_disk: bool, nodes: Sequence[int]
) -> _Executor:
    """Make an executor from the file of packed weights, or without the file if it is missing or unusable. Log the cause.

    - `is_of_disk`: --experts-on-disk is set, which maps a file of its own instead.
    - `nodes`: memory nodes over which weights are spread, which is impossible for a file's pages.
    """
    from penstock.models.packed_file import PackedError

    cause = "--experts-on-disk keeps experts in another" if is_of_disk else ""
    cause = cause or ("it can't be spread over this machine's memory nodes" if nodes else "")
    if cause:
        if os.path.exists(packed.path):  # noqa: PTH110  # Path.exists raises an error for a folder that can't be read
            _log.info("packed weights are not used: %s is one file, and %s", packed.path, cause)
        return make(None)
    with ExitStack() as stack:
        try:
            file = stack.enter_context(packed.open())
        except FileNotFoundError:
            file = None
            if (other := packed.find_other()) is not None:
                what = "with another --task, --weight-dtype or --merge-lora, or from another folder"
                _log.info("packed weights are not used: %s was packed %s", other, what)
        except PackedError as error:
            file = None
            _log.warning("packed weights are not used: %s", str(error))
        if file is not None:
            try:
                executor = make(file)
            except PackedError as error:
                _log.warning("packed weights are not used: %s", str(error))
            else:
                _log.info("weights are mapped from %s, %s", file.path, format_size(file.num_bytes))
                return executor
    return make(None)  # after the `except`, whose error would keep the memory of the first executor
