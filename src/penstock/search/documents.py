"""Reads files as blocks of text: plain text, Markdown, HTML and PDF."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple

MAX_BYTES = {".txt": 64 << 20, ".md": 64 << 20, ".rst": 64 << 20, ".html": 8 << 20, ".htm": 8 << 20, ".pdf": 64 << 20}
"""Kinds of files, and their largest size."""
_FENCE = re.compile(r"\s{0,3}(`{3,}+(?!.*`)|~{3,})(.*)")
_HEADING = re.compile(r"(#{1,6})\s(.*)")
_UNSEEN = frozenset({"script", "style", "template", "title", "nav", "noscript"})
_INLINE = frozenset(
    {"a", "abbr", "b", "bdi", "bdo", "cite", "code", "del", "dfn", "em", "font", "i", "img", "ins"}
    | {"kbd", "label", "mark", "q", "s", "samp", "small", "span", "strong", "sub", "sup", "time", "u", "var", "wbr"}
)
_HEADINGS = {f"h{level}": level for level in range(1, 7)}


class Block(NamedTuple):
    """A paragraph, or a heading of `level` 1 to 6."""

    text: str
    level: int = 0


class Unreadable(Exception):
    """Error for a file that can't be read. The message says why."""


def find(folder: Path, on_error: Callable[[OSError], None]) -> Iterator[Path]:
    """Yield the files of known kinds below a folder, by name. Skip hidden files, and links that leave the folder.

    `on_error` is called for folders that can't be listed.
    """
    root = folder.resolve()
    for place, folders, files in os.walk(folder, onerror=on_error):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            path = Path(place, name)
            if path.suffix.lower() not in MAX_BYTES or name.startswith("."):
                continue
            if Path(os.path.realpath(path)).is_relative_to(root):  # `Path.resolve` raises for a link to itself
                yield path


def read(path: Path, data: bytes) -> list[Block]:
    """Return the blocks of a file with this content. Raises Unreadable."""
    suffix = path.suffix.lower()
    if suffix == ".pdf":
        return [*_paragraphs(_text_of_pdf(path))]
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise Unreadable("it is not UTF-8") from None
    if suffix == ".md":
        return [*_markdown(text)]
    if suffix in (".html", ".htm"):
        page = _Page()
        page.feed(text)
        page.close()
        page.end()
        return page.blocks
    return [*_paragraphs(text)]


def _paragraphs(text: str) -> Iterator[Block]:
    for part in re.split(r"\n\s*\n", text):
        if stripped := part.strip():
            yield Block(stripped)


def _markdown(text: str) -> Iterator[Block]:
    lines: list[str] = []
    fence = ""
    for line in [*text.split("\n"), ""]:
        marks = _FENCE.match(line)
        if marks and not fence:
            fence = marks.group(1)
        elif marks and marks.group(1).startswith(fence) and not marks.group(2).strip():
            fence = ""
        heading = None if fence else _HEADING.match(line)
        if (heading or not line.strip()) and not fence:
            if part := "\n".join(lines).strip():
                yield Block(part)
            lines.clear()
            if heading and (title := _title(heading.group(2))):
                yield Block(title, len(heading.group(1)))
        else:
            lines.append(line)
    if part := "\n".join(lines).strip():  # a fence without an end
        yield Block(part)


def _title(text: str) -> str:
    """Return a heading without the marks at its end, which follow a space."""
    text = text.strip()
    bare = text.rstrip("#")
    return text if bare and not bare[-1].isspace() else bare.rstrip()


class _Page(HTMLParser):
    """Collects the visible text of a page."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.blocks: list[Block] = []
        self._parts: list[str] = []
        self._level = 0
        self._unseen: list[str] = []
        """Tags of open elements without visible text, each once. An end tag closes its element and those inside."""
        self._num_pre = 0
        """Number of open elements that keep white space."""

    def handle_starttag(self, tag: str, attrs: object) -> None:
        del attrs
        if tag in _UNSEEN:
            if tag not in self._unseen:
                self._unseen.append(tag)
        elif tag == "br":
            self._parts.append("\n")
        elif tag in ("td", "th"):
            self._parts.append(" ")
        elif tag not in _INLINE:
            self.end()
            self._level = _HEADINGS.get(tag, 0)
            self._num_pre += tag == "pre"

    def handle_endtag(self, tag: str) -> None:
        if tag in self._unseen:
            del self._unseen[self._unseen.index(tag) :]
        elif tag not in _INLINE | {"td", "th", "br"}:
            self.end()
            self._level = 0
            self._num_pre -= tag == "pre" and self._num_pre > 0

    def handle_data(self, data: str) -> None:
        if not self._unseen:
            self._parts.append(data if self._num_pre else re.sub(r"\s+", " ", data))

    def end(self) -> None:
        """End a block."""
        text = "".join(self._parts)
        self._parts.clear()
        if not text.strip():
            return
        if self._level:
            text = " ".join(text.split())
        elif self._num_pre:
            text = text.strip("\r\n").rstrip()
        else:
            text = re.sub(r" {2,}", " ", text.strip())
        self.blocks.append(Block(text, self._level))


def _text_of_pdf(path: Path) -> str:
    try:
        import pypdf
    except ImportError:
        raise Unreadable("pypdf is not installed: pip install 'penstock[pdf]'") from None
    try:
        return "\n\n".join([page.extract_text() for page in pypdf.PdfReader(path).pages])
    except Exception as error:  # its parser raises many kinds for broken files
        raise Unreadable(f"it can't be read as a PDF: {error}") from None
