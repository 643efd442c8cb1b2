"""The size of a `pip install penstock` in `site-packages`: the one count for `startup.py` and `peers.py`.

Every distribution that the package needs at run time, found by the metadata of the environment that runs this.
Installs nothing.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
BYTE_CODE = "__pycache__"


def required(names: Iterable[str]) -> dict[str, metadata.Distribution]:
    """The distributions that these requirements bring, by name; those that no platform marker leaves out."""
    found: dict[str, metadata.Distribution] = {}
    waiting = list(names)
    while waiting:
        requirement = Requirement(waiting.pop())
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        if name in found or (requirement.marker is not None and not requirement.marker.evaluate({"extra": ""})):
            continue
        found[name] = metadata.distribution(name)
        waiting += found[name].requires or ()
    return found


def distribution_files() -> Mapping[str, tuple[Path, ...]]:
    """The files of Penstock and of everything that it needs, by distribution; byte code included, console scripts not."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    files = {name: _files(distribution) for name, distribution in required(project["dependencies"]).items()}
    return files | {"penstock": _own_files()}


def _files(distribution: metadata.Distribution) -> tuple[Path, ...]:
    inside = (Path(str(file.locate())) for file in distribution.files or () if ".." not in file.parts)
    return tuple(path for path in inside if path.is_file())


def _own_files() -> tuple[Path, ...]:
    """The package's, and its compiled module's, which lies elsewhere in an editable installation."""
    import penstock
    from penstock.backends.native import _native

    package, module = Path(str(penstock.__file__)).parent, Path(str(_native.__file__))
    files = [path for path in package.rglob("*") if path.is_file()]
    return (*files, *(() if module.is_relative_to(package) else (module,)))


def without_byte_code(files: Iterable[Path]) -> tuple[Path, ...]:
    return tuple(path for path in files if BYTE_CODE not in path.parts)
