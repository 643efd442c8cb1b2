"""`penstock bench`: sends a workload to a server, or to a model in this process, and shows latencies and rates."""

from __future__ import annotations

import asyncio
import functools
import json
import secrets
import sys
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from penstock.cli import bench_results
from penstock.cli.files import output_file, plots_folder
from penstock.cli.options import (
    FILE,
    FOLDER,
    GroupedCommand,
    NumberRange,
    add_options,
    check_named,
    client_tls,
    config_options,
    is_given,
    model_argument,
    option_text,
    setting_keys,
    slo_option,
    tls_options,
    warn_of_unknown_variables,
    with_table,
)
from penstock.cli.workload_options import workload_options
from penstock.config.units import parse_duration
from penstock.lab.client import SILENCE_S, SendOptions, send
from penstock.lab.driving import drive
from penstock.lab.in_process import AskModel, Progress, notes_of, sender
from penstock.lab.pacing import Pace, WarmUp
from penstock.lab.prompts import Tokenizer, counter_of, write_prompts
from penstock.lab.records import Sent
from penstock.lab.target import Address, Endpoint, Questions, ServerTokenizer, Target
from penstock.lab.workload import Job, Workload
from penstock.lab.workload_choice import WorkloadChoice, check_closed_loop, check_exists, make_workload
from penstock.types.errors import ConfigError, PenstockError

if TYPE_CHECKING:
    from penstock.lab.results import AskedTarget, Load, Run
    from penstock.llm import AsyncLLM

DEFAULT_CONCURRENCY = 8
_COMPONENTS = ("model", "kv", "scheduler", "backend")
_NOT_HERE = ("model", "served_model_name", "tool_call_parser", "reasoning_parser")
_NAMED = ("stream", "extra_body", "tokenizer", "max_concurrency", "returns", "timeout")
"""Options recorded in a result if given on the command line, besides the settings of a model in this process."""
_SETTINGS = setting_keys(*_COMPONENTS)
_OTHERS = {"compare": bench_results.compare, "report": bench_results.show_report}


class _Bench(GroupedCommand):
    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        if args and args[0] in _OTHERS:
            return _OTHERS[args[0]].make_context(f"{info_name} {args[0]}", args[1:], parent, **extra)
        return super().make_context(info_name, args, parent, **extra)


class _Numbers(click.ParamType[tuple[float, ...]]):
    name = "numbers"

    def __init__(self, *, whole: bool) -> None:
        self._number: Callable[[str], float] = int if whole else float

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, ...]:
        try:
            numbers = tuple(self._number(part) for part in str(value).split(","))
        except ValueError:
            numbers = ()
        if not numbers or not all(0 < number < 1e9 for number in numbers):
            self.fail(f"{value!r} must be a number above 0, or a list such as 1,8,32.", param, ctx)
        return numbers


def _json_object(ctx: click.Context, param: click.Parameter, value: str | None) -> dict[str, object]:
    try:
        found = json.loads(value) if value else {}
    except json.JSONDecodeError as error:
        raise click.BadParameter(f"{value!r} is not JSON: {error}.", ctx, param) from None
    if not isinstance(found, dict):
        raise click.BadParameter(f"{value!r} is not a JSON object.", ctx, param)
    return found


def _warm_up(ctx: click.Context, param: click.Parameter, value: str) -> WarmUp:
    try:
        return WarmUp(num_jobs=int(value)) if value.isdigit() else WarmUp(seconds=parse_duration(value))
    except ValueError:
        raise click.BadParameter(f"{value!r} must be requests such as 8, or a time such as 5s.", ctx, param) from None


def _seconds(ctx: click.Context, param: click.Parameter, value: str) -> float:
    try:
        seconds = parse_duration(value)
    except ValueError as error:
        raise click.BadParameter(f"{error}.", ctx, param) from None
    if seconds <= 0:
        raise click.BadParameter(f"{value!r} must be greater than 0.", ctx, param)
    return seconds


_bench_options = add_options(
    click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="Server with OpenAI's API."),
    click.option("--in-process", is_flag=True, help="Load MODEL here instead, and ask it without HTTP."),
    click.option(
        "--endpoint",
        type=click.Choice([endpoint.value for endpoint in Endpoint]),
        default=Endpoint.COMPLETIONS.value,
        show_default=True,
        help="Route to ask.",
    ),
    click.option("--stream/--no-stream", default=True, show_default=True, help="Without streaming there is no first token."),
    click.option(
        "--api-key",
        envvar="PENSTOCK_API_KEY",
        multiple=True,  # as in the environment and the file, which may have keys of several clients
        metavar="KEY",
        help="Key of the server. One of PENSTOCK_API_KEY or --config is sent only to a server on this machine.",
    ),
    tls_options,
    click.option(
        "--extra-body",
        callback=_json_object,
        metavar="JSON",
        help='Fields for each request, such as {"top_p": 0.9}; null removes one.',
    ),
    click.option(
        "--tokenizer",
        metavar="MODEL",
        help="Count prompts' tokens with this model's tokenizer. Default: the server's own, where it has /tokenize.",
    ),
    click.option(
        "--concurrency",
        type=_Numbers(whole=True),
        metavar="N,...",
        help=f"Closed loop of N users. Default: {DEFAULT_CONCURRENCY}, for a workload without arrivals.",
    ),
    click.option("--rate", "rates", type=_Numbers(whole=False), metavar="PER_S,...", help="Open loop of requests per second."),
    click.option("--max-concurrency", type=click.IntRange(1), help="The most requests of an open loop at once; others wait."),
    click.option(
        "--warmup", default="0", callback=_warm_up, metavar="N|TIME", help="First requests, or seconds, that do not count."
    ),
    click.option("--repeat", type=click.IntRange(1, 100), default=1, show_default=True, help="Number of complete runs."),
    click.option(
        "--timeout", default=f"{SILENCE_S:g}s", callback=_seconds, show_default=True, help="Fail an answer after this silence."
    ),
    click.option(
        "--returns",
        type=click.IntRange(min=0),
        default=0,
        show_default=True,
        help="How often a refused client retries, after the Retry-After wait.",
    ),
    slo_option,
    click.option("--price-per-hour", type=NumberRange(0, min_open=True), help="Of the server, for the cost of tokens."),
    click.option("--json", "json_file", type=FILE, callback=output_file, help="Write the result, which `bench compare` reads."),
    click.option("--html", "html_file", type=FILE, callback=output_file, help="Write a report that opens offline."),
    click.option("--plots", type=FOLDER, callback=plots_folder, metavar="DIR", help="Write plots as PNG."),
)


@click.command(cls=_Bench)
@functools.partial(model_argument, is_optional=True)
@_bench_options
@functools.partial(workload_options, without=("rate",))
@config_options(*_COMPONENTS, without=_NOT_HERE[1:])
def bench(choice: WorkloadChoice, **values: Any) -> None:
    """Send a workload to a server, or to MODEL in this process, and show throughput, latencies, goodput and cost.

    \b
      penstock bench                                     100 requests, 8 at a time, to http://127.0.0.1:8000
      penstock bench --rate 1,2,4 --slo ttft=500ms       three open loops, one after the other
      penstock bench --workload trace.csv --json a.json  a trace, as it was recorded
      penstock bench report a.json --every-run           the tables again; also --html, --plots, --markdown
      penstock bench compare a.json b.json               is the difference more than noise?

    The options under Model and below are for --in-process, except for --model, --cache and --api-key. docs/bench.md defines
    every figure.
    """
    from penstock.lab.figures import parse_slos
    from penstock.lab.report import as_text, sections_of
    from penstock.lab.results import Result, any_ok, write_result

    warn_of_unknown_variables()
    slos, loads = parse_slos(values["slo"]), _loads(choice, values)
    check_exists(choice.workload)  # before a server is asked, or a model loaded
    text_seed = choice.seed if is_given("seed") else secrets.randbits(32)  # the server may have the texts of earlier commands
    runs: list[Run] = []
    is_interrupted = False
    try:
        with (_in_process if values["in_process"] else _over_http)(values) as asked:
            for nth, load in enumerate(loads * values["repeat"]):
                run, is_interrupted = _run(asked, choice, load, values, text_seed + (nth << 32))
                if run is not None:
                    runs.append(replace(run, slos=slos, price_per_hour=values["price_per_hour"]))
                if is_interrupted:
                    break
    finally:  # An error in one run must not lose earlier runs.
        if runs:
            result = Result(runs=runs)
            try:  # if the file can't be written, still print the tables
                if (path := values["json_file"]) is not None:
                    write_result(result, path)
            finally:
                print(as_text(list(sections_of(result, every_run=len(runs) == 1))), end="", flush=True)
                bench_results.write_files(result, html=values["html_file"], folder=values["plots"])
    if is_interrupted:
        sys.exit(130)
    if not any_ok(runs):
        sys.exit(1)


def _loads(choice: WorkloadChoice, values: Mapping[str, Any]) -> list[Load | None]:
    """Return the loads (users or rates) to run in turn; None runs the workload's own arrivals. Raises UsageError."""
    from penstock.lab.results import Load

    concurrency, rates = values["concurrency"], values["rates"]
    if concurrency is None:
        return [Load("rate", rate) for rate in rates or ()] or [None]
    check_closed_loop(replace(choice, rate=rates[0]) if rates else choice)
    if values["max_concurrency"] is not None:
        raise click.UsageError("--max-concurrency is for an open loop: leave it out, or --concurrency.")
    return [Load("concurrency", users) for users in concurrency]


def _pace(workload: Workload, load: Load | None, max_concurrency: int | None) -> Pace:
    if load is not None and load.kind == "concurrency":
        return Pace(concurrency=int(load.value))
    if max_concurrency is None and not any(job.arrival_ns for job in workload.jobs if job.after is None):
        return Pace(concurrency=DEFAULT_CONCURRENCY)
    return Pace(max_concurrency=max_concurrency)


# Targets: a server, or a model here


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    how: str
    target: AskedTarget
    tokenizer: Tokenizer | None
    notes: tuple[str, ...] = ()
    send: Callable[[Workload, Pace, Callable[[], object]], Sent]


@contextmanager
def _over_http(values: Mapping[str, Any]) -> Iterator[_Asked]:
    from penstock.lab.results import AskedTarget
    from penstock.serve.http.listener import raise_open_files_limit

    for name in _SETTINGS:  # Settings in the environment or a file may be for other commands.
        if name not in ("model", "cache") and is_given(name):
            raise click.UsageError(f"--{name.replace('_', '-')} is for --in-process: give it to the server.")
    if is_given("cancel_share") and (values["endpoint"] == Endpoint.EMBEDDINGS or not values["stream"]):
        raise click.UsageError("--cancel-share is for streams, since clients go away after some tokens: leave it out.")
    raise_open_files_limit()
    target = Target(
        url=values["url"].rstrip("/"),
        model=values["model"] if is_given("model") or is_given("model_word") else "",
        endpoint=Endpoint(values["endpoint"]),
        stream=values["stream"] and values["endpoint"] != Endpoint.EMBEDDINGS,
        api_key=_key_for(values["url"], values["api_key"], is_typed=is_given("api_key")),
        extra_body=values["extra_body"],
        tls=client_tls(values["cafile"], insecure=values["insecure"]),
    )
    with Questions(target) as questions:
        if not target.model:
            target = replace(target, model=questions.model())
    options = SendOptions(silence_s=values["timeout"], max_returns=values["returns"])
    with Questions(target) as questions:
        target, notes = questions.settle()
        tokenizer = _named_tokenizer(values) or ServerTokenizer.of(questions)
        if tokenizer is None:
            notes = (*notes, "Lengths of prompts are estimated; --tokenizer MODEL makes them exact.")
        for note in notes:
            print(f"Note: {note}", file=sys.stderr)

        def send_all(workload: Workload, pace: Pace, on_end: Callable[[], object]) -> Sent:
            return send(workload, target, pace=pace, warm_up=values["warmup"], options=options, on_end=on_end)

        asked = AskedTarget(url=target.url, model=target.model, server=questions.server())
        yield _Asked(how="http", target=asked, tokenizer=tokenizer, notes=notes, send=send_all)


@contextmanager
def _in_process(values: Mapping[str, Any]) -> Iterator[_Asked]:
    from penstock import __version__
    from penstock.lab.results import AskedTarget

    for name in ("url", "api_key", "cafile", "insecure", "extra_body", "stream", "timeout", "returns", "tenants"):
        if is_given(name):
            raise click.UsageError(f"--{name.replace('_', '-')} is for a server: leave it out, or --in-process.")
    if values["endpoint"] == Endpoint.EMBEDDINGS:
        raise click.UsageError("--endpoint embeddings needs a server: leave out --in-process.")
    check_named()
    values = with_table(values)
    tokenizer = _named_tokenizer(values) or load_tokenizer_of(values["model"], values["cache"])
    settings = {key: values[key] for key in _SETTINGS if key not in _NOT_HERE}
    with loaded(values["model"], settings, is_chat=values["endpoint"] == Endpoint.CHAT) as (name, ask):

        def send_all(workload: Workload, pace: Pace, on_end: Callable[[], object]) -> Sent:
            sent = asyncio.run(drive(workload, sender(ask), pace=pace, warm_up=values["warmup"], on_end=on_end))
            return replace(sent, notes=notes_of(workload))

        target = AskedTarget(model=name, server=f"penstock {__version__}")
        yield _Asked(how="in process", target=target, tokenizer=tokenizer, send=send_all)


@contextmanager
def loaded(
    model: str, settings: Mapping[str, Any], *, is_chat: bool = False, max_tokens: int | None = None
) -> Iterator[tuple[str, AskModel]]:
    """Load a model in this process, and yield its name and a function that sends it a prompt. Raises PenstockError.

    `max_tokens`: limit of every request. A stop token then ends each answer at the wanted length, unknown to the scheduler.
    None makes the wanted length the limit.
    """
    from penstock.llm import AsyncLLM

    llm = AsyncLLM(model, **settings)
    try:
        ask = functools.partial(_ask, llm, is_chat, max_tokens)
        hello = Job(arrival_ns=0, num_prompt_tokens=1, num_output_tokens=1, prompt="Hello")
        first = asyncio.run(drive(Workload(name="", jobs=[hello]), sender(ask)))
        if first.records and first.records[0].error:
            raise PenstockError(first.records[0].error)
        yield llm.model_name, ask
    finally:
        llm.close()


async def _ask(
    llm: AsyncLLM, is_chat: bool, max_tokens: int | None, prompt: Sequence[str] | Sequence[int], num_output_tokens: int
) -> AsyncGenerator[Progress, None]:
    from penstock.inprocess import SamplingParams

    params = SamplingParams(max_tokens=num_output_tokens, temperature=0.0, ignore_eos=True)
    if max_tokens is not None:  # make token 0 the stop token: forbidden by `min_tokens` until the end, then certain
        params = replace(params, max_tokens=max_tokens, min_tokens=num_output_tokens - 1)
        params = replace(params, stop_token_ids=[0], logit_bias={0: 100.0})
    texts = [part for part in prompt if isinstance(part, str)]
    if is_chat:
        roles = ("user", "assistant")
        outputs = llm.chat([{"role": roles[turn % 2], "content": text} for turn, text in enumerate(texts)], params)
    else:
        outputs = llm.generate("".join(texts) if texts else [part for part in prompt if isinstance(part, int)], params)
    async with aclosing(outputs):
        async for output in outputs:
            answer = output.outputs[0]
            yield Progress(
                num_prompt_tokens=len(output.prompt_token_ids),
                num_cached_tokens=output.num_cached_tokens,
                num_output_tokens=len(answer.token_ids),
                new_text=answer.new_text,
            )


def _key_for(url: str, api_keys: Sequence[str], *, is_typed: bool) -> str | None:
    """Return the API key to send. Raises PenstockError for a bad URL.

    Keys of the environment or a file are for `serve` on this machine, so only a server on this machine gets the first of them.
    """
    if is_typed:
        return api_keys[-1]
    return api_keys[0] if api_keys and Address.of(url).is_loopback else None


def _named_tokenizer(values: Mapping[str, Any]) -> Tokenizer | None:
    return None if values["tokenizer"] is None else load_tokenizer_of(values["tokenizer"], values["cache"])


def load_tokenizer_of(model: str, cache_folder: str | None) -> Tokenizer:
    """Load a model's tokenizer, after fetching the model if needed. Raises PenstockError."""
    from penstock.config.components import config_from
    from penstock.deploy.build import tokenizer_of
    from penstock.deploy.factory import locate
    from penstock.models.load import load_model

    found = {"model": model} if cache_folder is None else {"model": model, "cache": cache_folder}
    return tokenizer_of(load_model(locate(config_from(found))))  # maps the weights without reading them


# A run


def _run(
    asked: _Asked, choice: WorkloadChoice, load: Load | None, values: Mapping[str, Any], text_seed: int
) -> tuple[Run | None, bool]:
    """Run the workload at one load. Return (the run, or None without a record; whether the run was interrupted).

    `text_seed` seeds the prompts. It differs between the runs of a command, so that none finds its prompts cached.
    Raises ConfigError if all requests were in the warm-up.
    """
    from penstock.lab.figures import Samples
    from penstock.lab.results import Run, load_of

    tokenizer = asked.tokenizer
    count = None if tokenizer is None else counter_of(tokenizer)
    if load is not None and load.kind == "rate":
        choice = replace(choice, rate=load.value)
    workload = write_prompts(make_workload(choice, count), tokenizer, seed=text_seed)
    pace = _pace(workload, load, values["max_concurrency"])
    begun_at = datetime.now(UTC).isoformat(timespec="seconds")
    sent = _with_bar(asked, workload, pace)
    given = {name: values[name] for name in (*_NAMED, *_SETTINGS) if name != "model" and is_given(name)}
    plain = {name: value if isinstance(value, (bool, int, float)) else option_text(value) for name, value in given.items()}
    is_interrupted = bool(sent.unfinished) or sent.num_unsent > 0
    if not sent.records:
        if is_interrupted:
            return None, True
        raise ConfigError("All requests were in the warm-up.", remedy="Send more, or give a shorter --warmup.")
    run = Run(
        workload=workload.name,
        options={"endpoint": values["endpoint"], **plain},
        seed=choice.seed,
        load=load_of(choice.mean_rate, pace.concurrency),
        how=asked.how,
        target=asked.target,
        begun_at=begun_at,
        notes=(*asked.notes, *_notes(sent)),
        warnings=tuple(_warnings(sent, workload)),
        samples=Samples.of(sent.records),
    )
    return run, is_interrupted


def _with_bar(asked: _Asked, workload: Workload, pace: Pace) -> Sent:
    from tqdm import tqdm

    with tqdm(total=len(workload.jobs), unit=" requests", disable=not sys.stderr.isatty(), leave=False) as bar:
        return asked.send(workload, pace, bar.update)


def _notes(sent: Sent) -> Iterator[str]:
    if sent.num_warm_up:
        yield f"{sent.num_warm_up} requests of the warm-up do not count."
    if sent.client_cpu_s:
        num_sent, share = len(sent.records) + sent.num_warm_up, sent.client_cpu_s * 1e9 / max(1, sent.duration_ns)
        yield f"The client took {sent.client_cpu_s * 1e6 / num_sent:.0f} us of CPU time per request, {share:.1%} of a core."


def _warnings(sent: Sent, workload: Workload) -> Iterator[str]:
    yield from sent.notes
    num_prompt_tokens = sum(record.num_prompt_tokens for record in sent.records)
    num_cached_tokens = sum(record.num_cached_tokens or 0 for record in sent.records)
    # A chat template and chance account for less common text than this.
    share_nothing = all(job.after is None and not job.prefix for job in workload.jobs)
    if share_nothing and num_cached_tokens > 0.3 * num_prompt_tokens:
        yield (
            f"{num_cached_tokens / num_prompt_tokens:.0%} of the prompt tokens were in the server's prefix cache. The workload "
            "names no shared prefix: were these prompts sent before? Another --seed makes others."
        )
    if sent.unfinished or sent.num_unsent:
        yield (
            f"Interrupted: {len(sent.unfinished)} requests were under way and {sent.num_unsent} not sent. The figures are of "
            "the others, and short requests are over-represented."
        )
