"""Filling in the middle: the prompt that asks a model for what stands between two texts. Called by the server.

Models that were trained for it have three tokens for it, which are found by their names. All of these want the same order: what
stands before, what stands behind, and then the token after which the middle is written (Bavarian et al., arXiv 2207.14255).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.text.tokenizer import Tokenizer

NAMES = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma, Granite 4
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, StarCoder 2, Granite Code
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek Coder
)
"""Tokens before the text that comes first, before the one that comes last, and before the middle, of families of models."""
REPOSITORIES = ("<|repo_name|>", "<repo_name>", "<reponame>")
"""Tokens before the name of a repository, whose files follow."""
FILES = ("<|file_sep|>", "<|file_separator|>", "<file_sep>", "<filename>")
"""Tokens before the name of a file, and its text."""
ENDS = ("<|endoftext|>", "<|fim_pad|>", "<fim_pad>", "<|file_sep|>", "<|file_separator|>", "<file_sep>", "<|repo_name|>")
"""Tokens with which such models end a middle; some only where another file of the training text would begin."""

_REPOSITORY, _FILE = "repository", "file"
"""Names of what nobody has named: the repository of the files, and the file with the hole."""


@dataclass(frozen=True, slots=True)
class FillInTheMiddle:
    """The tokens of one model that ask for a middle."""

    before: str
    behind: str
    middle: str
    end_token_ids: tuple[int, ...]
    """They end what is filled in, beside the model's own end tokens."""
    repository: str = ""
    file: str = ""
    """Before the names of a repository and of a file; empty: the model has no such token."""

    def text(self, first: str, last: str) -> str:
        """The prompt whose continuation is the text between `first` and `last`."""
        return f"{self.before}{first}{self.behind}{last}{self.middle}"

    def file_text(self, name: str, text: str) -> str:
        """Another file, as it stands before the text that has a hole."""
        return f"{self.file}{name}\n{text}" if self.file else f"{text}\n\n"

    def text_after_files(self, files: Sequence[str], first: str, last: str) -> str:
        """As `text`, behind other files, which `file_text` has made."""
        if not files or not self.file:
            return "".join(files) + self.text(first, last)
        repository = f"{self.repository}{_REPOSITORY}\n" if self.repository else ""
        return repository + "".join(files) + self.file_text(_FILE, self.text(first, last))

    def token_ids(self, first: Sequence[int], last: str, tokenizer: Tokenizer) -> list[int]:
        """The same, where the first text is tokens already."""
        before = tokenizer.encode(self.before, add_special_tokens=False)
        rest = tokenizer.encode(f"{self.behind}{last}{self.middle}", add_special_tokens=False)
        return [*before, *first, *rest]


def find_fim(tokenizer: Tokenizer) -> FillInTheMiddle | None:
    """The tokens of a tokenizer that ask for a middle; None if it has none of these names."""
    for names in NAMES:
        if all(_token_id(tokenizer, name) is not None for name in names):
            ends = [token_id for name in ENDS if (token_id := _token_id(tokenizer, name)) is not None]
            return FillInTheMiddle(*names, tuple(ends), _first(tokenizer, REPOSITORIES), _first(tokenizer, FILES))
    return None


def _first(tokenizer: Tokenizer, names: Sequence[str]) -> str:
    """The first of these names that is a token; empty if none is."""
    return next((name for name in names if _token_id(tokenizer, name) is not None), "")


def _token_id(tokenizer: Tokenizer, name: str) -> int | None:
    """The id of a token of this name; None if the name is ordinary text to the tokenizer."""
    found = tokenizer.encode(name, add_special_tokens=False)
    return found[0] if len(found) == 1 and tokenizer.token_text(found[0]) == name else None
