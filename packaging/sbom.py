"""The bill of materials of a wheel, as CycloneDX JSON on standard output: what of other projects its files contain.

    .venv/bin/python packaging/sbom.py x86_64-linux-gnu-g++

packaging/wheels.sh calls it; CMakeLists.txt puts the result into .dist-info/sboms (PEP 770). What pip installs beside the wheel
is in the wheel's metadata, and not here. The environment has to be that of the lock, whose nanobind the wheel is built with.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[1]


def found(pattern: str, text: str) -> tuple[str, ...]:
    """Return what the only match of `pattern` has in its groups."""
    [match] = re.finditer(pattern, text, re.MULTILINE | re.DOTALL)
    return match.groups()


def component(name: str, version: str | None, licence: str, purl: str, place: str) -> dict[str, object]:
    described = {"type": "library", "name": name, "description": place, "licenses": [{"expression": licence}]}
    if version is None:
        return {**described, "purl": f"pkg:{purl}"}
    return {**described, "version": version, "purl": f"pkg:{purl}@{version}"}


def components(compiler: str) -> list[dict[str, object]]:
    """Return what is linked into the modules, what was copied into the source, and the libraries of the page."""
    lock = (ROOT / "packaging/requirements-dev.lock").read_text(encoding="utf-8")
    [nanobind] = found(r"^nanobind==(\S+)", lock)
    if metadata.version("nanobind") != nanobind:
        raise SystemExit(
            f"error: nanobind {metadata.version('nanobind')} is installed, not {nanobind}. Run make install-locked."
        )
    policy = "nanobind/ext/robin_map/include/tsl/robin_growth_policy.h"
    header = Path(str(metadata.distribution("nanobind").locate_file(policy))).read_text(encoding="utf-8")
    robin_map = ".".join(found(r"VERSION_MAJOR (\d+).*VERSION_MINOR (\d+).*VERSION_PATCH (\d+)", header))
    gcc = subprocess.run([compiler, "-dumpfullversion"], capture_output=True, text=True, check=True).stdout.strip()
    fetched = (ROOT / "packaging/page_libraries.sh").read_text(encoding="utf-8")
    [highlight] = found(r"^fetch @highlightjs/cdn-assets ([\d.]+)", fetched)
    [temml] = found(r"^fetch temml ([\d.]+)", fetched)
    return [
        component("nanobind", nanobind, "BSD-3-Clause", "pypi/nanobind", "linked into _native"),
        component("robin-map", robin_map, "MIT", "github/tessil/robin-map", "linked into _native, by nanobind"),
        component("libstdc++", gcc, "GPL-3.0-or-later WITH GCC-exception-3.1", "generic/gcc", "linked into the modules"),
        component("ggml", None, "MIT", "github/ggml-org/ggml", "the values of models/codebooks.h, compiled into _native"),
        component("highlight.js", highlight, "BSD-3-Clause", "npm/%40highlightjs/cdn-assets", "in serve/page/vendor"),
        component("temml", temml, "MIT", "npm/temml", "in serve/page/vendor"),
    ]


def main() -> None:
    [version] = found(r'^__version__ = "(.+?)"', (ROOT / "src/penstock/__init__.py").read_text(encoding="utf-8"))
    bill = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": component("penstock", version, "Apache-2.0", "pypi/penstock", "this wheel")},
        "components": components(sys.argv[1]),
    }
    print(json.dumps(bill, indent=2))


if __name__ == "__main__":
    main()
