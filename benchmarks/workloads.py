"""Named workloads: prompts and reply lengths from real traces, for `peers.py` and others. Sends nothing.

Each is fixed by its name, the model's tokenizer and the traces, so that two machines measure the same thing:

- `sharegpt`: first turns of conversations in file order, with at least 4 prompt and 16 reply tokens and at most 2,048
  together; then prompts are cut at 512 tokens and replies at 200.
- `azure`: every k-th row of a production trace, lengths divided by 4; the text is consecutive pieces of the
  conversations, so no two prompts share a prefix.
- `short`: 32 tokens in, 32 out, of the same text.
- `long`: 1,500 tokens in, 16 out, likewise; cutting may lose a few tokens. Nearly all work is in the prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.lab.prompts import Tokenizer, cut
from penstock.lab.traces import read_conversations, read_workload
from penstock.lab.transforms import divide_lengths
from penstock.lab.workload import Job

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
LONG = "long"
LONG_PROMPT_TOKENS, LONG_REPLY_TOKENS = 1500, 16


def trace_file(traces: Path, name: str = SHAREGPT_FILE) -> Path:
    """A trace by its name. Raises SystemExit if it is not there, with how to get it."""
    path = traces / name
    if not path.is_file():
        raise SystemExit(
            f"{path} is missing. Every workload needs {SHAREGPT_FILE}, and azure {AZURE_FILE} as well; name their folder "
            f"with --traces. {TRACES_HELP}"
        )
    return path


@dataclass(frozen=True, slots=True)
class Source:
    """The requests of a workload."""

    traces: Path
    tokenizer: Tokenizer
    max_prompt_tokens: int = MAX_PROMPT_TOKENS
    max_reply_tokens: int = MAX_REPLY_TOKENS

    def conversations(self) -> Iterator[tuple[str, str]]:
        """First prompt and first reply of each conversation."""
        return (turns[0] for turns in read_conversations(trace_file(self.traces)))

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def pieces(self, lengths: Sequence[int]) -> Iterator[tuple[str, int]]:
        """Texts of about these numbers of tokens, one after the other from the conversations' replies."""
        replies = (self.ids(reply) for _, reply in self.conversations())
        held: list[int] = []
        for length in lengths:
            while len(held) < length:
                held += next(replies)
            yield cut(self.tokenizer, held[:length], length)
            held = held[length:]


def _job(prompt: str, num_prompt_tokens: int, num_output_tokens: int) -> Job:
    return Job(arrival_ns=0, num_prompt_tokens=num_prompt_tokens, num_output_tokens=num_output_tokens, prompt=prompt)


def sharegpt(source: Source, count: int) -> list[Job]:
    jobs: list[Job] = []
    for prompt, reply in source.conversations():
        if len(jobs) == count:
            break
        ids, num_reply = source.ids(prompt), len(source.ids(reply))
        if len(ids) < MIN_PROMPT_TOKENS or num_reply < MIN_REPLY_TOKENS or len(ids) + num_reply > MAX_CONVERSATION_TOKENS:
            continue
        text, num_prompt = (
            (prompt, len(ids)) if len(ids) <= source.max_prompt_tokens else cut(source.tokenizer, ids, source.max_prompt_tokens)
        )
        jobs.append(_job(text, num_prompt, min(num_reply, source.max_reply_tokens)))
    return jobs


def azure(source: Source, count: int) -> list[Job]:
    jobs = divide_lengths(read_workload(trace_file(source.traces, AZURE_FILE)), AZURE_DIVISOR).jobs
    drawn = [jobs[nth * len(jobs) // count] for nth in range(min(count, len(jobs)))]
    texts = source.pieces([job.num_prompt_tokens for job in drawn])
    return [_job(*piece, job.num_output_tokens) for piece, job in zip(texts, drawn, strict=True)]


def short(source: Source, count: int) -> list[Job]:
    return [_job(*piece, SHORT_TOKENS) for piece in source.pieces([SHORT_TOKENS] * count)]


def long(source: Source, count: int) -> list[Job]:
    return [_job(*piece, LONG_REPLY_TOKENS) for piece in source.pieces([LONG_PROMPT_TOKENS] * count)]


WORKLOADS: dict[str, Callable[[Source, int], list[Job]]] = {"sharegpt": sharegpt, "azure": azure, "short": short, LONG: long}


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
        "reply_tokens": sum(job.num_output_tokens for job in jobs),
    }


def read_tokenizer(model: Path) -> Tokenizer:
    """The tokenizer of a GGUF file, whatever the architecture of its model."""
    from penstock.models.gguf import read_vocab
    from penstock.models.gguf_file import open_gguf
    from penstock.text.tokenizer import load_tokenizer

    file = open_gguf(model)
    return load_tokenizer(read_vocab(file, len(file.get_list("tokenizer.ggml.tokens", str))))
