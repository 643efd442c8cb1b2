"""Fill-in-the-middle prompts, which ask a model for the text between two others.

Models trained for it have three special tokens. The prompt is the text before, the text after, and the token after which the
model writes the middle (Bavarian et al., arXiv 2207.14255).
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
"""Tokens before the first text, before the last text and before the middle, by family."""
REPOSITORIES = ("<|repo_name|>", "<repo_name>", "<reponame>")
"""Tokens before the name of a repository."""
FILES = ("<|file_sep|>", "<|file_separator|>", "<file_sep>", "<filename>")
"""Tokens before the name and the text of a file."""
ENDS = ("<|endoftext|>", "<|fim_pad|>", "<fim_pad>", "<|file_sep|>", "<|file_separator|>", "<file_sep>", "<|repo_name|>")
"""Tokens that end the middle: end of text, padding, and the beginning of another file."""

_REPOSITORY, _FILE = "repository", "file"
"""Names in the prompt for the repository and for the file with the hole."""


@dataclass(frozen=True, slots=True)
class FillInTheMiddle:
    """The special tokens of a model for fill-in-the-middle prompts."""

    before: str
    behind: str
    middle: str
    end_token_ids: tuple[int, ...]
    """Tokens that end the middle, besides the model's end tokens."""
    repository: str = ""
    file: str = ""
    """Tokens before the names of a repository and a file; empty if the model has none."""

    def text(self, first: str, last: str) -> str:
        """Return the prompt for the text between `first` and `last`."""
        return f"{self.before}{first}{self.behind}{last}{self.middle}"

    def file_text(self, name: str, text: str) -> str:
        """Return another file (its name and text) in the form for `text_after_files`."""
        return f"{self.file}{name}\n{text}" if self.file else f"{text}\n\n"

    def text_after_files(self, files: Sequence[str], first: str, last: str) -> str:
        """Return the prompt `text(first, last)` after other `files`, each made by `file_text`."""
        if not files or not self.file:
            return "".join(files) + self.text(first, last)
        repository = f"{self.repository}{_REPOSITORY}\n" if self.repository else ""
        return repository + "".join(files) + self.file_text(_FILE, self.text(first, last))

    def token_ids(self, first: Sequence[int], last: str, tokenizer: Tokenizer) -> list[int]:
        """Return the prompt's token ids. Like `text`, but the text before the gap is already tokenised."""
        before = tokenizer.encode(self.before, add_special_tokens=False)
        rest = tokenizer.encode(f"{self.behind}{last}{self.middle}", add_special_tokens=False)
        return [*before, *first, *rest]


def find_fim(tokenizer: Tokenizer) -> FillInTheMiddle | None:
    """Return the tokens for fill-in-the-middle prompts, or None if the vocabulary lacks them."""
    for names in NAMES:
        if all(_token_id(tokenizer, name) is not None for name in names):
            ends = [token_id for name in ENDS if (token_id := _token_id(tokenizer, name)) is not None]
            return FillInTheMiddle(*names, tuple(ends), _first(tokenizer, REPOSITORIES), _first(tokenizer, FILES))
    return None


def _first(tokenizer: Tokenizer, names: Sequence[str]) -> str:
    return next((name for name in names if _token_id(tokenizer, name) is not None), "")


def _token_id(tokenizer: Tokenizer, name: str) -> int | None:
    found = tokenizer.encode(name, add_special_tokens=False)
    return found[0] if len(found) == 1 and tokenizer.token_text(found[0]) == name else None
