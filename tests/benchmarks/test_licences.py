"""Everything that `pip install penstock` brings is under a licence that any user can accept."""

from __future__ import annotations

import re
import tomllib
from email.message import Message
from pathlib import Path

import installed
import pytest

ROOT = Path(__file__).parents[2]
PERMITTED = {"0BSD", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "CC0-1.0", "MIT", "MPL-2.0", "PSF-2.0", "Zlib"}
"""SPDX identifiers. MPL-2.0 asks for the source of the files under it alone. See docs/dependencies.md before adding one."""
OLD_NAMES = {
    "Apache": "Apache-2.0",
    "Apache Software License": "Apache-2.0",
    "BSD License": "BSD-3-Clause",
    "MIT License": "MIT",
}
"""The identifiers of older metadata. "BSD License" may also mean two clauses, which is permitted, too."""


def licence(metadata: Message) -> str:
    """Return the SPDX expression in a distribution's metadata, or an empty string."""
    given = str(metadata.get("License-Expression") or metadata.get("License") or "")
    classifiers = [str(line).rpartition(" :: ")[2] for line in metadata.get_all("Classifier") or () if "License ::" in line]
    names = [given] if given and "\n" not in given else classifiers  # License may hold the whole text
    return " AND ".join(OLD_NAMES.get(name, name) for name in names)


def not_permitted(expression: str) -> list[str]:
    """Return what of an expression has no permitted licence. `A OR B` needs only one of them."""
    terms = re.split(r"\s+AND\s+", re.sub(r"[()]", "", expression))
    return [term for term in terms if PERMITTED.isdisjoint(re.split(r"\s+OR\s+", term))]


def test_licences_of_all_that_is_installed_are_permitted() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = {name: licence(distribution.metadata) for name, distribution in installed.required(project["dependencies"]).items()}
    assert len(found) > len(project["dependencies"])
    assert {name: text for name, text in found.items() if not_permitted(text)} == {}


@pytest.mark.parametrize(
    ("expression", "refused"),
    [
        ("MIT", []),
        ("MPL-2.0 AND (Apache-2.0 OR MIT)", []),
        ("GPL-3.0-only OR MIT", []),
        ("MIT AND GPL-3.0-only", ["GPL-3.0-only"]),
        ("AGPL-3.0-or-later", ["AGPL-3.0-or-later"]),
        ("GPL-3.0-or-later WITH GCC-exception-3.1", ["GPL-3.0-or-later WITH GCC-exception-3.1"]),
        ("Apache License, Version 2.0", ["Apache License, Version 2.0"]),
        ("", [""]),
    ],
)
def test_a_licence_that_is_not_listed_is_refused(expression: str, refused: list[str]) -> None:
    assert not_permitted(expression) == refused


def test_licences_are_read_from_old_metadata_too() -> None:
    old, older, text, unknown = Message(), Message(), Message(), Message()
    old["License"] = "MIT"
    text["License"] = "Copyright (c) 2005-2023, NumPy Developers.\n  All rights reserved."
    text["Classifier"] = "License :: OSI Approved :: BSD License"
    older["Classifier"] = "License :: OSI Approved :: BSD License"
    unknown["Classifier"] = "License :: Other/Proprietary License"
    assert [licence(metadata) for metadata in (old, older, text, Message())] == ["MIT", "BSD-3-Clause", "BSD-3-Clause", ""]
    assert not_permitted(licence(unknown))
