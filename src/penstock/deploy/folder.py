"""The folder of `--models-dir` while the server runs: what was put there since the start becomes models of the deployment.

Names come from the folder's entries alone: a request's name is compared with them, and never made into a path.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from pathlib import Path

from penstock.deploy.served import ServedModel
from penstock.models.catalog import ModelSource, list_folder
from penstock.types.errors import PenstockError

_log = logging.getLogger(__name__)

MAX_FOUND = 1000
"""Models that are taken in while a server runs: each one keeps its counts, also when its file is gone."""


class ModelFolder:
    def __init__(
        self,
        path: Path,
        serve: Callable[[ModelSource], ServedModel],
        known: Iterable[Path],
    ) -> None:
        """`known`: entries that are served already."""
        self._path = path
        self._serve = serve
        self._known = set(known)
        self._num_found = 0
        self._has_told = False
        """The log has said why nothing is found."""

    def find_new(self) -> list[ServedModel]:
        """The models that no call before has returned, and that are not known. Reads the disk; one caller at a time."""
        try:
            sources = [source for source in list_folder(self._path) if source.path not in self._known]
        except (OSError, PenstockError) as error:
            self._tell("the folder %s can't be read, so that nothing new is found there: %s", self._path, error)
            return []
        found: list[ServedModel] = []
        for source in sources:
            if self._num_found >= MAX_FOUND:
                self._tell("%d models were found in %s since the start: no more are, until the next one", MAX_FOUND, self._path)
                break
            self._known.add(source.path)  # also one that is no use, which is told once
            try:
                found.append(self._serve(source))
            except PenstockError as error:
                _log.error("%s is not served: %s", source.path, error)
                continue
            self._num_found += 1
            _log.info("%s was put into the folder of models: it is loaded when it is asked for", source.name)
        return found

    def _tell(self, text: str, *values: object) -> None:
        """Once: every request with an unknown name makes the server look."""
        if not self._has_told:
            self._has_told = True
            _log.error(text, *values)
