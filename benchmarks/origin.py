"""The origin of a comparison: builds, versions, settings and inputs, so that rounds of different ones are never mixed.

Called by `peers.py`, which writes it into its result and reads it there before it adds rounds. Measures nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from contenders import CONTENDERS
from peer_setup import RECIPES
from sessions import Contender

import penstock

MEASURED_BY = ("sessions.py", "peers/drive_openvino.py", "peers/write_bf16.py")
"""Beside the command lines, what decides how a contender is run and loaded."""
DIGITS = 16
"""Digits of a checksum."""


def sha256(pieces: Iterable[bytes]) -> str:
    """The checksum of all pieces in order."""
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()[:DIGITS]


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:DIGITS]


def build_told() -> dict[str, str]:
    """Which Penstock this is, its compiled module included, and which programs measure it."""
    package, here = Path(penstock.__file__).parent, Path(__file__).parent
    files = sorted(path for path in package.rglob("*") if path.suffix in (".py", ".so", ".pyd"))
    return {
        "version": penstock.__version__,
        "sha256": sha256(path.read_bytes() for path in files),
        "measured_by_sha256": sha256((here / name).read_bytes() for name in MEASURED_BY),
    }


def contenders_told(ready: Sequence[Contender]) -> dict[str, dict[str, Any]]:
    """The version and settings of each, by name; Penstock's version is the build's."""
    told = {}
    for contender in ready:
        environment = CONTENDERS[contender.name][0]
        told[contender.name] = {
            "version": None if environment is None else RECIPES[environment][0],
            "command": [str(word) for word in contender.command],
            "environ": dict(contender.environ),
        }
    return told


def read_same(path: Path, expected: Mapping[str, Any]) -> dict[str, Any]:
    """An earlier result, with its rounds. Raises SystemExit if anything of `expected` was another then."""
    try:
        report = dict(json.loads(path.read_text(encoding="utf-8").strip().splitlines()[-1]))
    except (IndexError, ValueError, TypeError):
        raise SystemExit(f"{path} can't be added to: its last line is no result. Delete it to begin anew.") from None
    differences = list(differ(report, json.loads(json.dumps(expected)), ""))
    if "records" not in report:
        differences = ["it was written without its rounds"]
    if differences:
        raise SystemExit(f"{path} can't be added to: {'; '.join(differences)}. Delete it to begin anew.")
    return report


def differ(then: Mapping[str, Any], now: Mapping[str, Any], prefix: str) -> Iterable[str]:
    """One sentence for each value of `now` that is another, or none, in `then`; below the top, the other way round, too."""
    for name in [*now, *(then.keys() - now.keys() if prefix else ())]:
        was, here = then.get(name), now.get(name)
        if isinstance(was, Mapping) and isinstance(here, Mapping):
            yield from differ(was, here, f"{prefix}{name} ")
        elif was != here:
            yield f"its {prefix}{name} is {was}, here it is {here}"
