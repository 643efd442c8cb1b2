"""Code that `run` and `chat` share: their options, and a session that prints answers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from penstock.cli.options import NumberRange, add_options, config_options, setting_keys, warn_of_unknown_variables
from penstock.types.errors import PenstockError, counted
from penstock.types.sampling import PARAMETERS, Parameter

if TYPE_CHECKING:
    from penstock.inprocess import RequestOutput, StructuredOutputsParams

_Command = TypeVar("_Command", bound=Callable[..., Any])

CUT_OFF = "[cut off: --max-tokens, the limit in the model's files or its context is used up]"
DEFAULT_TEMPERATURE = 0.7
MAX_INT32 = 2**31 - 1
"""Largest `max_tokens`, as in the server."""

_COMPONENTS = ("model", "kv", "backend")
_NOT_HERE = (
    "served_model_name",
    "tool_call_parser",
    "reasoning_parser",
    "kv_watermark",
    "kv_eviction",
    "kv_eviction_args",
    "kv_rest",
)


class NotEmpty(click.ParamType[str]):
    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if not value:
            self.fail("an empty text would end every answer before it begins.", param, ctx)
        return str(value)


def check_text(what: str, text: str | None) -> None:
    """Raise PenstockError for an argument in another encoding than the locale's: Python gives its bytes as lone surrogates."""
    try:
        (text or "").encode()
    except UnicodeEncodeError:
        message = f"{what} is not text in the encoding of this locale ({sys.getfilesystemencoding()})."
        remedy = "Use UTF-8 in the terminal and the locale (LC_ALL=C.UTF-8), or send UTF-8 through a pipe."
        raise PenstockError(message, remedy=remedy) from None


def _range(one: Parameter) -> click.ParamType[Any]:
    own = one.spellings["cli"]
    if one.kind is int:
        return click.IntRange(int(own.low), int(own.high))
    return NumberRange(own.low, own.high, min_open=own.excludes_low)


_SAMPLING = tuple(name for name, one in PARAMETERS.items() if "cli" in one.spellings and name != "seed")
_OPTIONS = (
    click.option("--system", metavar="TEXT", help="System message."),
    click.option(
        "--max-tokens",
        type=click.IntRange(1, MAX_INT32),
        show_default="the model's, or what the context has room for",
        help="Longest answer.",
    ),
    *[
        click.option(
            f"--{name.replace('_', '-')}",
            type=_range(one),
            show_default=f"the model's, or {DEFAULT_TEMPERATURE if name == 'temperature' else one.neutral:g}",
            help=one.text,
        )
        for name, one in PARAMETERS.items()
        if name in _SAMPLING
    ],
    click.option(
        "--seed", "answer_seed", type=click.IntRange(-(2**63), 2**63 - 1), show_default="drawn", help="Same seed, same answer."
    ),
    click.option(
        "--stop", type=NotEmpty(), multiple=True, metavar="TEXT", help="End the answer at this text; may be repeated."
    ),
    click.option("--stats", is_flag=True, help="Tokens and times on stderr."),
)


def talk_options(command: _Command) -> _Command:
    """Decorate a command with the options of a conversation, then with the engine's settings."""
    return add_options(*_OPTIONS)(config_options(*_COMPONENTS, without=_NOT_HERE)(command))


class Session:
    """A loaded model in this process that prints its answers. Leaving the context frees the model."""

    def __init__(self, values: Mapping[str, Any], structured_outputs: StructuredOutputsParams | None = None) -> None:
        """Load the model. `values`: option -> value. Raises PenstockError if it can't be fetched or loaded."""
        from penstock.inprocess import SamplingParams
        from penstock.llm import LLM

        warn_of_unknown_variables()
        asked = {name: values[name] for name in ("max_tokens", "stop", *_SAMPLING) if values[name] is not None}
        asked |= {"seed": values["answer_seed"], "structured_outputs": structured_outputs}
        SamplingParams(**asked)  # checks ranges before the model is loaded
        settings = {key: values[key] for key in setting_keys(*_COMPONENTS) if key not in ("model", *_NOT_HERE)}
        # One request at a time, so that the KV cache is for one conversation.
        self._llm = LLM(values["model"], max_num_seqs=1, **settings)
        self._params = SamplingParams(
            **{"temperature": DEFAULT_TEMPERATURE, "max_tokens": None} | self._llm.default_sampling | asked
        )
        self.answer: RequestOutput | None = None
        """The last answer, which may have been interrupted."""

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._llm.close()

    def ask_chat(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Print the model's next message. Raises PenstockError, and KeyboardInterrupt after Ctrl-C."""
        self._print(self._llm.stream_chat(messages, self._params))

    def ask_raw(self, prompt: str) -> None:
        """Print the model's continuation of a text. Raises like `ask_chat`."""
        self._print(self._llm.stream(prompt, self._params))

    def _print(self, answers: Iterator[RequestOutput]) -> None:
        self.answer = None
        for self.answer in answers:
            sys.stdout.write(self.answer.outputs[0].new_text)
            sys.stdout.flush()


def stats_line(answer: RequestOutput) -> str:
    """Format an answer's token counts and times, for `--stats`."""
    num_tokens, times = len(answer.outputs[0].token_ids), answer.metrics
    first_s = times.first_token_time_s or times.last_token_time_s
    decode_s = times.last_token_time_s - first_s
    rate = f", then {(num_tokens - 1) / decode_s:.1f} tokens/s" if num_tokens > 1 and decode_s > 0 else ""
    return f"{counted(num_tokens, 'token')}; the first after {(first_s - times.arrival_time_s) * 1000:.0f} ms{rate}"
