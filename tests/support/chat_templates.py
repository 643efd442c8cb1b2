"""Chat templates of models that tests start."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest

from penstock.text import chat


@contextmanager
def one_process_for_each_template() -> Iterator[None]:
    """Let models with the same template share its process, which takes a tenth of a second to start."""
    make = chat.ChatTemplate

    @functools.cache
    def made(source: str, special_tokens: tuple[tuple[str, str], ...]) -> chat.ChatTemplate:
        return make(source, special_tokens=dict(special_tokens))

    def shared(source: str, *, special_tokens: Mapping[str, str]) -> chat.ChatTemplate:
        return made(source, tuple(special_tokens.items()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat, "ChatTemplate", shared)
        yield
