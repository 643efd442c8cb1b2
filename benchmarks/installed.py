"""How much disk does a `pip install penstock` take in `site-packages`? Also counts for `peers.py`.

Counts every distribution that the package needs at run time, found by this environment's metadata, without byte code, whose
amount depends on what was imported and by whom. All of pip's byte code is reported separately. The script
installs nothing.

    python benchmarks/installed.py
"""

from __future__ import annotations

import argparse
import marshal
import re
import tomllib
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from printed import origin

ROOT = Path(__file__).parents[1]
BYTE_CODE = "__pycache__"
BYTE_CODE_HEAD_BYTES = 16


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
    files = [path for path in package.rglob("*") if path.is_file() and path.suffix != ".pyi"]  # the wheel has none
    return (*files, *(() if module.is_relative_to(package) else (module,)))


def without_byte_code(files: Iterable[Path]) -> tuple[Path, ...]:
    return tuple(path for path in files if BYTE_CODE not in path.parts)


def installed_mb() -> dict[str, float]:
    """Size of Penstock and of everything that it needs, without byte code, the largest first."""
    sizes = {
        name: sum(path.stat().st_size for path in without_byte_code(files)) for name, files in distribution_files().items()
    }
    return {name: round(size / 1e6, 3) for name, size in sorted(sizes.items(), key=lambda item: -item[1])}


def byte_code_mb() -> float:
    """Size of the byte code of all of it, whether it is there or not."""
    sources = (path for files in distribution_files().values() for path in files if path.suffix == ".py")
    return sum(BYTE_CODE_HEAD_BYTES + len(_compiled(path)) for path in sources) / 1e6


def _compiled(path: Path) -> bytes:
    return marshal.dumps(compile(path.read_bytes(), str(path), "exec", dont_inherit=True))


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    sizes = installed_mb()
    largest = ", ".join(f"{name} {size:.1f}" for name, size in sizes.items() if size >= 1)
    print(origin(f"{len(sizes)} packages"))
    total = f"{sum(sizes.values()):.1f} MB without byte code, which takes {byte_code_mb():.1f}"
    print(f"Installed: {total}; of 1 MB or more: {largest}.")


if __name__ == "__main__":
    main()
