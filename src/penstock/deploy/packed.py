"""The file with a model's packed weights: where it lies, what it must be made of, and whether a start uses it.

Only `penstock pack` writes it: a server that wrote it unasked would fill disks. Every start looks for it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from penstock import __version__
from penstock.config.units import format_size

if TYPE_CHECKING:
    from penstock.models.packed_file import PackedFile

_log = logging.getLogger(__name__)
_Executor = TypeVar("_Executor")


@dataclass(frozen=True, slots=True)
class PackedWeights:
    folder: Path
    model: Path
    adapter: Path | None
    """Merged into the weights."""
    weight_dtype: str | None

    @property
    def path(self) -> Path:
        """The file. Each model, merged adapter and type of numbers has its own."""
        parts = repr([str(self.model.resolve()), self.adapter and str(self.adapter.resolve()), self.weight_dtype])
        name = re.sub(r"[^\w.-]", "_", self.model.stem)[:100]
        return self.folder / f"{name}-{blake2b(parts.encode(), digest_size=4).hexdigest()}.packed"

    def identity(self) -> dict[str, str]:
        """Return what the file must be made of. Raises OSError if the model's files can't be read."""
        from penstock.models.load import fingerprint
        from penstock.models.packed_file import LAYOUT

        return {
            "version": f"{__version__}, layout {LAYOUT}",
            "weights": fingerprint(self.model).hex(),
            "adapter": "none" if self.adapter is None else fingerprint(self.adapter).hex(),
            "weight_dtype": self.weight_dtype or "the default",
        }

    def open(self, *, is_checked: bool = False) -> AbstractContextManager[PackedFile]:
        """Open the file, as `open_packed` does. Raises FileNotFoundError, and PackedError if it can't be used."""
        from penstock.models.packed_file import open_packed

        return open_packed(self.path, self.identity(), is_checked=is_checked)


def make_with_packed(
    packed: PackedWeights, make: Callable[[PackedFile | None], _Executor], *, is_of_disk: bool, nodes: Sequence[int]
) -> _Executor:
    """Make an executor from the file of packed weights, or without it if it is missing or can't be used. Log the cause.

    - `is_of_disk`: --experts-on-disk, which has a file of its own
    - `nodes`: memory nodes over which weights are spread, which pages of a file are not
    """
    from penstock.models.packed_file import PackedError

    if not packed.path.exists():
        return make(None)
    cause = "--experts-on-disk keeps experts in another" if is_of_disk else ""
    cause = cause or ("it can't be spread over this machine's memory nodes" if nodes else "")
    if not cause:
        try:
            with packed.open() as file:
                executor = make(file)
            _log.info("weights are mapped from %s, %s", file.path, format_size(file.num_bytes))
            return executor
        except PackedError as error:
            _log.warning("packed weights are not used: %s `penstock pack` writes them again.", error)
            return make(None)
        except FileNotFoundError:  # it was deleted just now
            return make(None)
    _log.info("packed weights are not used: %s is one file, and %s", packed.path, cause)
    return make(None)
