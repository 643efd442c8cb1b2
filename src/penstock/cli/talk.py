"""A talk with a model in the terminal: the options that `run` and `chat` share, and the session that asks and prints.

talk_options      the options, from which `talk_config` and `sampling_choices` read
Session           the model, asked one question at a time
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import click

from penstock.cli.options import config_options, warn_of_unknown_variables
from penstock.config import Config
from penstock.config.components import config_from
from penstock.types.errors import PenstockError, counted
from penstock.types.request import FinishReason, Request
from penstock.types.sampling import MIN_TEMPERATURE, SamplingParams

if TYPE_CHECKING:
    from penstock.engine.ports import OutputChunk
    from penstock.text.grammar import Grammar

_Command = TypeVar("_Command", bound=Callable[..., Any])

CUT_OFF = "[cut off: --max-tokens or the model's context is used up]"
MAX_TOP_K = 2**31 - 1
"""The server's limit."""


class NumberRange(click.FloatRange):
    """A range that "nan" is not in."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value} is not a number.", param, ctx)
        return float(number)


class NotEmpty(click.ParamType[str]):
    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if not value:
            self.fail("it is empty, so every answer would end before it begins.", param, ctx)
        return str(value)


_OPTIONS = (
    click.option("--system", metavar="TEXT", help="System message."),
    click.option("--max-tokens", type=click.IntRange(1), show_default="what the context has room for", help="Longest answer."),
    click.option("--temperature", type=NumberRange(0, 2), default=0.7, show_default=True, help="0 always takes the likeliest."),
    click.option(
        "--top-p", type=NumberRange(0, 1, min_open=True), default=1.0, show_default=True, help="Share of probability kept."
    ),
    click.option("--top-k", type=click.IntRange(0, MAX_TOP_K), default=0, show_default=True, help="Tokens kept; 0 keeps all."),
    click.option("--min-p", type=NumberRange(0, 1), default=0.0, show_default=True, help="Least share of the likeliest."),
    click.option("--seed", "answer_seed", type=int, show_default="drawn", help="Same seed, same answer."),
    click.option(
        "--stop", type=NotEmpty(), multiple=True, metavar="TEXT", help="End the answer at this text; may be repeated."
    ),
    click.option("--stats", is_flag=True, help="Tokens and times on stderr."),
)


def talk_options(command: _Command) -> _Command:
    """Adds the options of a talk, then the settings of the engine below it."""
    command = config_options(
        "model", "kv", "backend", without=("served_model_name", "kv_watermark", "kv_eviction", "kv_eviction_args")
    )(command)
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def talk_config(values: Mapping[str, Any]) -> Config:
    """The engine for one reader: a single row, so that the KV cache is no larger than one conversation."""
    config = config_from(values)
    return replace(config, scheduler=replace(config.scheduler, max_num_seqs=1))


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingChoices:
    """The user's choices about sampling."""

    max_tokens: int | None
    """None: as many as the context has room for."""
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int | None
    stop: tuple[str, ...]
    grammar: Grammar | None = None
    """The grammar that the answer follows; None: any answer will do."""


def sampling_choices(values: Mapping[str, Any]) -> SamplingChoices:
    """The choices that the sampling options make."""
    if 0 < values["temperature"] < MIN_TEMPERATURE:
        raise click.BadParameter(f"0 is greedy; otherwise at least {MIN_TEMPERATURE}.", param_hint="'--temperature'")
    names = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "stop")
    return SamplingChoices(seed=values["answer_seed"], **{name: values[name] for name in names})


@dataclass(slots=True)
class Answer:
    text: str = ""
    chunks: list[OutputChunk] = field(default_factory=list)
    """Those that carried tokens or the end, in order."""
    asked_ns: int = 0

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.chunks[-1].finish_reason if self.chunks else None


class Session:
    """Asks a running model and prints what it says. A context manager: leaving it stops the engine."""

    def __init__(self, config: Config, choices: SamplingChoices) -> None:
        """Raises PenstockError if the model can't be fetched or loaded."""
        from penstock.deploy.factory import locate, start_model

        warn_of_unknown_variables()
        self._runtime = start_model(config, locate(config))
        self._choices = choices
        self._runner = asyncio.Runner()
        self.answer = Answer()
        """The last one, also if it was interrupted."""

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._runner.close()
        self._runtime.close()

    def ask_chat(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Print the model's next message. Raises PenstockError; KeyboardInterrupt after Ctrl-C stopped it."""
        if self._runtime.chat_template is None:
            raise PenstockError("This model has no chat template.", remedy="Name one with --chat-template, or use --raw.")
        text = self._runtime.chat_template.render(messages, add_generation_prompt=True)
        self._ask(self._runtime.tokenizer.encode(text, add_special_tokens=False))

    def ask_raw(self, prompt: str) -> None:
        """Print how the model continues a text. Raises as `ask_chat` does."""
        self._ask(self._runtime.tokenizer.encode(prompt, add_special_tokens=True))

    def _ask(self, token_ids: list[int]) -> None:
        self.answer = Answer(asked_ns=self._runtime.clock.now_ns())
        request = self._request(token_ids)
        # On Ctrl-C the runner cancels the task, which leaves the stream, which aborts the request.
        self._runner.run(self._print(request))
        last = self.answer.chunks[-1]
        if last.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
            raise PenstockError(last.detail or "The engine ended the answer.")

    async def _print(self, request: Request) -> None:
        async for chunk in self._runtime.bridge.stream(request):
            self.answer.text += chunk.text
            self.answer.chunks.append(chunk)
            if chunk.text:
                sys.stdout.write(chunk.text)
                sys.stdout.flush()

    def _request(self, token_ids: list[int]) -> Request:
        model, choices = self._runtime.model, self._choices
        unknown = next((token_id for token_id in token_ids if token_id >= model.vocab_size), None)
        if unknown is not None:
            raise PenstockError(
                f"The prompt contains {self._runtime.tokenizer.token_text(unknown)!r}, which the model does not have.",
                remedy="Leave it out: only the tokenizer knows it.",
            )
        room = model.max_model_len - len(token_ids)
        if room < 1:
            raise PenstockError(
                f"The prompt has {len(token_ids)} tokens; {model.name} takes {model.max_model_len}, the answer included.",
                remedy="Shorten it; in a chat, /reset begins anew.",
            )
        sources = self._runtime.sources
        sampling = SamplingParams(
            max_tokens=min(choices.max_tokens or room, room),
            temperature=choices.temperature,
            top_p=choices.top_p,
            top_k=choices.top_k,
            min_p=choices.min_p,
            seed=sources.draw_seed() if choices.seed is None else choices.seed % (1 << 64),
            stop_token_ids=model.eos_token_ids,
            stop=choices.stop,
            follows_grammar=choices.grammar is not None,
        )
        matcher = None if choices.grammar is None else self._runtime.grammars.matcher(choices.grammar)
        return Request(sources.new_request_id(), tuple(token_ids), sampling, arrival_ns=self.answer.asked_ns, matcher=matcher)


def stats_line(answer: Answer) -> str:
    """Tokens and times of an answer, for stderr."""
    last = answer.chunks[-1]
    num_tokens = last.num_generated_tokens
    first_ns = last.first_token_ns or last.at_ns
    decode_s = (last.at_ns - first_ns) / 1e9
    rate = f", then {(num_tokens - 1) / decode_s:.1f} tokens/s" if num_tokens > 1 and decode_s > 0 else ""
    return f"{counted(num_tokens, 'token')}; the first after {(first_ns - answer.asked_ns) / 1e6:.0f} ms{rate}"
