"""Named workloads: prompts and reply lengths from real traces, for `serve.py` and `peers.py`. Sends nothing.

Each is fixed by its name, the model's tokenizer and the traces, so that two machines measure the same thing:

- `sharegpt`: first turns of conversations in file order, with at least 4 prompt and 16 reply tokens and at most 2,048
  together; then prompts are cut at 512 tokens and replies at 200.
- `azure`: every k-th row of a production trace, lengths divided by 4; the text is consecutive pieces of the
  conversations, so no two prompts share a prefix.
- `short`: 32 tokens in, 32 out, of the same text.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from load import Job

TRACES_HELP = (
    "The first is the first 1,000 conversations of ShareGPT_V3 (id, conversations[{from, value}], one object a line), "
    "the second AzureLLMInferenceTrace_conv.csv of github.com/Azure/AzurePublicDataset (TIMESTAMP, ContextTokens, "
    "GeneratedTokens); docs/performance.md has their checksums."
)
DEFAULT_TRACES = Path(__file__).parents[2] / "shared" / "traces"
SHAREGPT_FILE = "sharegpt_1000.jsonl"
AZURE_FILE = "azure_conv_2023.csv"
MIN_PROMPT_TOKENS = 4
MIN_REPLY_TOKENS = 16
MAX_CONVERSATION_TOKENS = 2048
MAX_PROMPT_TOKENS = 512
MAX_REPLY_TOKENS = 200
AZURE_DIVISOR = 4
SHORT_TOKENS = 32


class Tokenizer(Protocol):
    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...


@dataclass(frozen=True, slots=True)
class Source:
    """The requests of a workload."""

    traces: Path
    tokenizer: Tokenizer
    max_prompt_tokens: int = MAX_PROMPT_TOKENS
    max_reply_tokens: int = MAX_REPLY_TOKENS

    def trace(self, name: str) -> Path:
        """Raises SystemExit if it is not there, with how to get it."""
        path = self.traces / name
        if not path.is_file():
            raise SystemExit(
                f"{path} is missing. Every workload needs {SHAREGPT_FILE}, and azure {AZURE_FILE} as well; name their folder "
                f"with --traces. {TRACES_HELP}"
            )
        return path

    def conversations(self) -> Iterator[tuple[str, str]]:
        """First prompt and first reply of each conversation."""
        with self.trace(SHAREGPT_FILE).open(encoding="utf-8") as file:
            for line in file:
                turns = json.loads(line)["conversations"]
                if len(turns) >= 2:
                    yield turns[0]["value"], turns[1]["value"]

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def cut(self, token_ids: Sequence[int], max_tokens: int) -> tuple[str, int]:
        """A text of at most `max_tokens` of these tokens, and how many it has.

        A cut through a character or a word may be encoded differently again, so the text is what is counted.
        """
        for num_tokens in range(min(max_tokens, len(token_ids)), 0, -1):
            text = self.tokenizer.decode(token_ids[:num_tokens], skip_special_tokens=False).rstrip("\ufffd")
            count = len(self.ids(text))
            if 0 < count <= max_tokens:
                return text, count
        raise ValueError("these tokens make no text")

    def pieces(self, lengths: Sequence[int]) -> Iterator[tuple[str, int]]:
        """Texts of about these numbers of tokens, one after the other from the conversations' replies."""
        replies = (self.ids(reply) for _, reply in self.conversations())
        held: list[int] = []
        for length in lengths:
            while len(held) < length:
                held += next(replies)
            yield self.cut(held[:length], length)
            held = held[length:]


def sharegpt(source: Source, count: int) -> list[Job]:
    jobs: list[Job] = []
    for prompt, reply in source.conversations():
        if len(jobs) == count:
            break
        ids, num_reply = source.ids(prompt), len(source.ids(reply))
        if len(ids) < MIN_PROMPT_TOKENS or num_reply < MIN_REPLY_TOKENS or len(ids) + num_reply > MAX_CONVERSATION_TOKENS:
            continue
        text, num_prompt = (
            (prompt, len(ids)) if len(ids) <= source.max_prompt_tokens else source.cut(ids, source.max_prompt_tokens)
        )
        jobs.append(Job(text, num_prompt, min(num_reply, source.max_reply_tokens)))
    return jobs


def azure(source: Source, count: int) -> list[Job]:
    with source.trace(AZURE_FILE).open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    drawn = [rows[k * len(rows) // count] for k in range(count)]
    prompts = [max(1, int(row["ContextTokens"]) // AZURE_DIVISOR) for row in drawn]
    replies = [max(1, int(row["GeneratedTokens"]) // AZURE_DIVISOR) for row in drawn]
    return [Job(*piece, reply) for piece, reply in zip(source.pieces(prompts), replies, strict=True)]


def short(source: Source, count: int) -> list[Job]:
    return [Job(*piece, SHORT_TOKENS) for piece in source.pieces([SHORT_TOKENS] * count)]


WORKLOADS: dict[str, Callable[[Source, int], list[Job]]] = {"sharegpt": sharegpt, "azure": azure, "short": short}


def read_jobs(name: str, source: Source, count: int) -> list[Job]:
    """`count` jobs of a named workload. Raises ValueError for an unknown name or a trace that is too short."""
    if name not in WORKLOADS:
        raise ValueError(f"no workload {name!r}; there are {', '.join(WORKLOADS)}")
    jobs = WORKLOADS[name](source, count)
    if len(jobs) < count:
        raise ValueError(f"{name} has only {len(jobs)} of {count} jobs")
    return jobs


def describe(jobs: Sequence[Job]) -> dict[str, int]:
    return {
        "requests": len(jobs),
        "prompt_tokens": sum(job.num_prompt_tokens for job in jobs),
        "reply_tokens": sum(job.max_tokens for job in jobs),
    }


def read_tokenizer(model: Path) -> Tokenizer:
    """The tokenizer of a GGUF file, whatever the architecture of its model."""
    from penstock.models.gguf import read_vocab
    from penstock.models.gguf_file import open_gguf
    from penstock.text.tokenizer import load_tokenizer

    file = open_gguf(model)
    return load_tokenizer(read_vocab(file, len(file.get_list("tokenizer.ggml.tokens", str))))
