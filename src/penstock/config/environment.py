"""The environment variables that are nobody's: found for the commands, which warn of them. Never reads a setting's value."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from penstock.config.file import all_settings

PREFIX = "PENSTOCK_"
_OTHERS = ("PENSTOCK_CONFIG", "PENSTOCK_DEBUG")


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """A sentence for each variable that begins with PENSTOCK_ and that nothing reads, with the name that was probably meant."""
    known = [*(item.env for item in all_settings()), *_OTHERS]
    return [_warning(name, known) for name in sorted(environ) if name.startswith(PREFIX) and name not in known]


def _warning(name: str, known: list[str]) -> str:
    # Without the common beginning, which would make all of them alike.
    close = difflib.get_close_matches(name.removeprefix(PREFIX), [item.removeprefix(PREFIX) for item in known], n=1)
    guess = f" Did you mean {PREFIX}{close[0]}?" if close else ""
    return f"The environment variable {name} is unknown and has no effect.{guess}"
