"""Keeps the names of control tokens in clients' texts from becoming control tokens.

A chat template writes control tokens and clients' texts into one prompt. If a client's text contains a name such as
`<|im_start|>`, the conversation is rendered a second time with the names in clients' texts masked. Where the two prompts
differ, a name came from a client, and the prompt is cut and tokenised in parts there (docs/decisions/chat-templates.md).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

from penstock.text.dialects import REASONING_FORMATS, SPELLED_PARTS, TOOL_FORMATS, Dialect, Message, PastCall, marks_of
from penstock.text.tokenizer import Tokenizer
from penstock.types.errors import Rejected, wrong

Render: TypeAlias = Callable[[Sequence[Message], Sequence[Mapping[str, Any]], Mapping[str, Any]], str]
"""Renders messages, tools and further variables of the chat template."""

_MAX_SPARED = 4
"""Most names that are tested, with one more rendering each, for whether the template itself looks for them."""
_FIRST, _OTHER = "0", "1"
"""Masks of the character before a cut and of others in a name: digits, since templates hardly change them."""
_TAGS = frozenset({"<tool_response>", "</tool_response>", "<tools>", "</tools>"}).union(
    *(marks_of(tools, None) for tools in TOOL_FORMATS), *(marks_of(None, reasoning) for reasoning in REASONING_FORMATS)
)
"""Tags of reasoning and calls. Frameworks write them into messages, for example to describe tools. So tags that are not special
tokens stay tokens in messages, but not in tools and their results.
"""
_REMOVED = re.compile(r"""\breplace\(\s*('[^'\\]+'|"[^"\\]+")\s*,\s*(?:''|"")\s*\)""")
"""A text that a template removes from others, such as `/think`."""


class ControlTokens:
    """The names of a model's control tokens. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, source: str, dialect: Dialect) -> None:
        """`source`: the chat template. Control tokens are special tokens, and added tokens with a bar or in the template."""
        self._source = source
        self._tokenizer = tokenizer
        special = {name: is_special for name, is_special in tokenizer.added_names.items() if _is_name(name)}
        bars, formats = frozenset("|｜"), {one.name for one in (dialect.tools, dialect.reasoning) if one}
        self._names = frozenset(name for name, is_special in special.items() if is_special or name in source or bars & {*name})
        tags = {name for name in self._names & _TAGS if not special[name] and not bars & {*name}}
        self._by_role = {
            "tool": self._names,
            # Harmony's marks begin new messages, so an assistant's earlier text does not keep them.
            "assistant": self._names - tags - (frozenset() if "openai" in formats else dialect.marks),
        }
        self._others = self._names - tags
        self._has_normalized = not self._names.isdisjoint(tokenizer.normalized.values())
        self._removed = [found[1][1:-1] for found in _REMOVED.finditer(source)]
        reasoning = dialect.reasoning
        self._reasoning = None if reasoning is None else (SPELLED_PARTS.findall(reasoning.open)[0], reasoning.close)
        self._by_part = {part: name for name in self._names for part in _searched_parts(name)}
        firsts = {part[0] for part in self._by_part}
        self._firsts = re.compile(f"[{re.escape(''.join(sorted(firsts)))}]" if firsts else "(?!)")
        self._lengths: dict[str, set[int]] = {}
        for part in self._by_part:
            self._lengths.setdefault(part[:2], set()).add(len(part))

    def cuts(
        self,
        prompt: str,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        render: Render,
    ) -> tuple[int, ...]:
        """Return where to cut a prompt so that no name from a client is tokenised as a control token.

        `prompt` is the result of `render` for the other arguments. Each cut is inside a name. A name that the template itself
        looks for, as in `content.split('<|end_think|>')`, remains a control token. Raises `Rejected` if a name changes other
        parts of the prompt, or if the template joins a name's parts. Also raises the errors of `render`.
        """
        found: set[str] = set()

        def differences(spared: Collection[str]) -> tuple[int, ...] | None:
            mask = partial(self._masked, spared, found)
            masks = [partial(mask, self._by_role.get(message.role, self._others)) for message in messages]
            masked = (
                [_of_message(message, own) for message, own in zip(messages, masks, strict=True)],
                [_walked(tool, partial(mask, self._names)) for tool in tools],
                {name: _walked(value, partial(mask, self._others)) for name, value in variables.items()},
            )
            return _differences(prompt, render(*masked)) if found else ()

        if (cuts := differences(())) is not None:
            return cuts
        spared = {name for name in found if name in self._source}
        if len(spared) <= _MAX_SPARED:
            for name in sorted(spared):
                if differences(spared - {name}) is not None:
                    spared.remove(name)
            if (cuts := differences(spared)) is not None:
                return cuts
        raise _refused(found, "where the chat template changes them")

    def _masked(self, spared: Collection[str], found: set[str], names: Collection[str], text: str) -> str:
        """Return the text with its names masked, at the same length. Add the masked names to `found`."""
        chars: list[str] = []
        for start, end, name in self._find(text):
            if name not in names or name in spared:
                continue
            found.add(name)
            chars = chars or list(text)
            # Only characters that JSON never escapes, so that the length stays.
            ascii_places = [at for at in range(start, end) if "!" <= text[at] <= "~" and text[at] not in '"\\']
            first = next((at for at in ascii_places if at < end - 1 and text[at] != _FIRST), start)
            for at in ascii_places:
                if chars[at] != _FIRST:
                    chars[at] = _OTHER
            chars[first] = _FIRST
        self._check_rest(names, text)
        return "".join(chars) if chars else text

    def _check_rest(self, names: Collection[str], text: str) -> None:
        """Raise `Rejected` if a text gets new control tokens when templates remove parts of it, such as earlier reasoning."""
        rest = text
        for part in self._removed:
            rest = rest.replace(part, "")
        if self._reasoning is not None:
            begin, end = self._reasoning
            rest = "".join([part.partition(begin)[0] for part in rest.split(end)])
        if len(rest) < len(text) and (more := Counter(self._names_in(rest)) - Counter(self._names_in(text))).keys() & {*names}:
            raise _refused(more, "in pieces that the chat template joins")

    def _names_in(self, text: str) -> list[str]:
        return [name for _, _, name in self._find(text)]

    def _find(self, text: str) -> Iterator[tuple[int, int, str]]:
        """Yield (start, end, name) of each control token in a text. The span is one of the name's `_searched_parts`. Spans may
        overlap."""
        for begin in self._firsts.finditer(text):
            start = begin.start()
            for length in self._lengths.get(text[start : start + 2], ()):
                part = text[start : start + length]
                if part in self._by_part:
                    yield start, start + len(part), self._by_part[part]
        if self._has_normalized:
            yield from [found for found in self._tokenizer.find_normalized(text) if found[2] in self._names]


def _refused(names: Iterable[str], where: str) -> Rejected:
    named = ", ".join(sorted(names)[:3])
    return wrong(f"The messages contain control tokens ({named}) {where}. Leave them out.", "messages")


def _is_name(name: str) -> bool:
    """Return whether a control token can be recognised by its name. Words, `/nothink` and quotes, which users write, can't."""
    is_usual = name[:1] in ('"', "\\") or any(char.isalnum() or char.isspace() for char in (name[:1], name[-1:]))
    return len(name) > 2 and not is_usual


def _searched_parts(name: str) -> set[str]:
    """Return the part of a name that is searched for, as it is and as JSON spells it: `|im_end|` for `<|im_end|>`, which a
    template that writes `<` + key + `>` would complete.
    """
    part = name[1:-1] if len(name) > 4 and name[1] in "|｜" else name
    return {part, json.dumps(part, ensure_ascii=False)[1:-1]}


def _of_message(message: Message, mask: Callable[[str], str]) -> Message:
    return replace(
        message,
        content=mask(message.content),
        name=None if message.name is None else mask(message.name),
        calls=tuple(PastCall(mask(call.call_id), mask(call.name), _walked(call.arguments, mask)) for call in message.calls),
        call_id=mask(message.call_id),
        reasoning=mask(message.reasoning),
    )


def _walked(value: Any, mask: Callable[[str], str]) -> Any:
    """Return JSON data with its texts masked."""
    written = json.dumps(value, ensure_ascii=False)
    masked = mask(written)
    return value if masked is written else json.loads(masked)


def _differences(prompt: str, masked: str) -> tuple[int, ...] | None:
    """Return the end of each character that is masked as `_FIRST`, or None if the prompts differ in more than masks."""
    if len(prompt) != len(masked):
        return None
    places = [at for at, (char, mask) in enumerate(zip(prompt, masked, strict=True)) if char != mask]
    if any(masked[at] not in (_FIRST, _OTHER) for at in places):
        return None
    return tuple([at + 1 for at in places if masked[at] == _FIRST])
