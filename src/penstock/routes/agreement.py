"""Agreement of several answers of the small model, as its confidence.

Equal answers to one question are more often right (Wang et al., arXiv 2203.11171), so a cascade can ask the large model where
they differ (Yue et al., arXiv 2310.03094).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

_QUOTES, _ENDS = "*`\"' ", ".,;:!?"


def normalised(text: str, part: re.Pattern[str] | None) -> str:
    """Return a text as it is compared: without case, runs of spaces, quotes around it and punctuation after it.

    `part`: only its last match counts, or that's first group. Without a match, the whole text does.
    """
    if part is not None and (found := [*part.finditer(text)]):
        text = found[-1][min(1, part.groups)] or ""
    return " ".join(text.split()).casefold().lstrip(_QUOTES).rstrip(_QUOTES + _ENDS)


def majority(texts: Sequence[str]) -> tuple[int, float]:
    """Return the first of the texts that most others equal, and the share of these. Among equals, the first one's wins."""
    [(said, count)] = Counter(texts).most_common(1)
    return texts.index(said), count / len(texts)
