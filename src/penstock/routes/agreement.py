"""Agreement of several answers to one question.

Equal answers are more often right (Wang et al., arXiv 2203.11171), so a cascade can ask the large model where those of the
small one differ (Yue et al., arXiv 2310.03094).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

_QUOTES, _ENDS = "*`\"' ", ".,;:!?"


def normalised(text: str, part: re.Pattern[str] | None) -> str:
    """Return a text as it is compared: without case, runs of spaces, quotes around it and punctuation after it.

    `part`: compare only its last match, or that match's first group. Without a match: the whole text.
    """
    if part is not None and (found := [*part.finditer(text)]):
        text = found[-1][min(1, part.groups)] or ""
    return " ".join(text.split()).casefold().lstrip(_QUOTES).rstrip(_QUOTES + _ENDS)


def majority(texts: Sequence[str]) -> tuple[int, int]:
    """Return the index of the most frequent text, and its count. In a tie, the text that comes first wins."""
    [(said, count)] = Counter(texts).most_common(1)
    return texts.index(said), count
