"""The folder of `--models-dir`, watched while the server runs: files added there become models of the deployment.

The name in a request is compared with the folder's entries, and never made into a path.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from pathlib import Path

from penstock.deploy.running import ServedModel
from penstock.models.catalog import ModelSource, list_folder
from penstock.types.errors import PenstockError

_log = logging.getLogger(__name__)

MAX_FOUND = 1000
"""Most models added while the server runs. Each keeps its metrics, even when its file is removed."""


class ModelFolder:
    def __init__(self, path: Path, serve: Callable[[ModelSource], ServedModel], known: Iterable[Path]) -> None:
        self._path = path
        self._serve = serve
        self._known = {path.absolute() for path in known}
        self._num_found = 0
        self._has_logged = False

    def find_new(self) -> list[ServedModel]:
        """Return the models that were added since the last call. Reads the disk. One caller at a time."""
        try:
            sources = [source for source in list_folder(self._path) if source.path not in self._known]
        except (OSError, PenstockError) as error:
            self._log_once("the folder %s can't be read, so that nothing new is found there: %s", self._path, error)
            return []
        found: list[ServedModel] = []
        for source in sources:
            if self._num_found >= MAX_FOUND:
                self._log_once("%d models were found in %s since the start: a restart finds more", MAX_FOUND, self._path)
                break
            self._known.add(source.path)  # a useless one is logged once
            try:
                found.append(self._serve(source))
            except PenstockError as error:
                _log.error("%s is not served: %s", source.path, error)
                continue
            self._num_found += 1
            _log.info("%s was added to the models folder: it is loaded on request", source.name)
        return found

    def _log_once(self, text: str, *values: object) -> None:
        """Log an error once in the life of this object: every request for an unknown name looks here."""
        if not self._has_logged:
            self._has_logged = True
            _log.error(text, *values)
