"""`penstock batch run`: answers a file of requests without a server. An interrupted run can be resumed.

The requests run as a batch of a server without a port. Its folder, OUT.job, is deleted once the answers are moved out.
"""

from __future__ import annotations

import asyncio
import signal
import sqlite3
import sys
import time
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from penstock.cli.files import check_folder, check_regular, sha256_of
from penstock.cli.options import (
    EPILOG,
    GroupedCommand,
    config_options,
    models_argument,
    routing_of_file,
    warn_of_unknown_variables,
)
from penstock.types.errors import PenstockError, counted
from penstock.types.request import Owner

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from penstock.deploy.deployment import Deployment
    from penstock.jobs.store import Batch, Store
    from penstock.serve.api import Parts

KIND, OWNER = "command", Owner()
MAX_WINDOW_S = 10 * 365 * 24 * 3600
MAX_BYTES, MAX_LINE_BYTES = 1 << 60, 1 << 30
_LOOKED_EACH_S = 0.2
_FORMAT = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"
"""Format of the bar without tqdm's estimate, which follows the last second although requests differ in length."""
_COMPONENTS = ("model", "kv", "lora", "scheduler", "backend", "sharing", "log")


@click.group()
def batch() -> None:
    """Answer files of requests."""


@batch.command(cls=GroupedCommand, epilog=EPILOG)
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@models_argument
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Default: FILE with .out.jsonl appended.")
@config_options(*_COMPONENTS)
def run(file: Path, words: tuple[str, ...], tables: Sequence[Mapping[str, object]], output: Path | None, **values: Any) -> None:
    """Answer the requests of FILE, in the form of OpenAI's batches, by one MODEL or several.

    \b
      {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...]}}

    Requests with a common prefix run one after another, so the answers come in another order. Lines that could not be
    answered are in OUT.errors.jsonl. If the command is interrupted, run it again to resume.
    """
    from penstock.cli.serve import models_in, set_up_logging
    from penstock.config.several import configs_of
    from penstock.deploy.factory import start_deployment

    check_regular(file)
    output = output or file.with_name(file.name + ".out.jsonl")
    errors, folder = output.with_name(output.name + ".errors.jsonl"), output.with_name(output.name + ".job")
    check_folder(folder)
    ended = _ended_before(file, folder)
    if ended is None:
        for path in (output, errors):
            _check_free(path)
        if not any(values[key] for key in ("preset", "batching", "budget", "budget_args")):
            values["preset"] = "offline"
        configs = configs_of(values, words=words, tables=tables, folder=models_in(values["models_dir"]))
        set_up_logging(configs[0].log)
        warn_of_unknown_variables()
        deployment = start_deployment(configs, routing=routing_of_file())
        try:
            _hear_ends_as_interrupts()
            ended = asyncio.run(_run(deployment, file, folder))
        except KeyboardInterrupt:
            click.echo(f"Interrupted. Answers so far are in {folder}: run the same command again to go on.", err=True)
            raise
        finally:
            deployment.close()
    _move_out(ended, folder, output, errors)
    if ended.errors:
        places = [f"{file}:{error['line']}" if error["line"] else str(file) for error in ended.errors]
        told = "\n".join(f"{place}: {error['message']}" for place, error in zip(places, ended.errors, strict=True))
        raise PenstockError(f"{file} can't be run.\n{told}")
    usage = ended.usage
    click.echo(
        f"{counted(ended.num_completed, 'answer')} in {output}; {usage.get('input_tokens', 0)} prompt tokens, "
        f"{usage.get('cached_tokens', 0)} of them from the cache; {usage.get('output_tokens', 0)} answer tokens"
    )
    if ended.num_failed:
        raise PenstockError(f"{counted(ended.num_failed, 'line')} failed.", remedy=f"See {errors}.")


def _hear_ends_as_interrupts() -> None:
    """Let SIGTERM and SIGHUP interrupt the run as Ctrl-C does, so that no line counts as one that the server failed at."""
    ends = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is not signal.SIG_IGN]  # `nohup`

    def interrupt(*_: object) -> None:
        for number in ends:  # both may come, and a second interrupt would break off the end
            signal.signal(number, signal.SIG_IGN)
        signal.raise_signal(signal.SIGINT)

    for number in ends:
        signal.signal(number, interrupt)


def _check_free(path: Path) -> None:
    if path.exists():
        raise PenstockError(f"{path} is there already.", remedy="Remove it, or name another one with --output.")


@contextmanager
def _disk_errors_of(folder: Path) -> Iterator[None]:
    """Raise PenstockError for errors of the disk."""
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        raise PenstockError(f"{folder} can't be written: {error}.", remedy="Run the command again when it can.") from error


def _ended_before(file: Path, folder: Path) -> Batch | None:
    """Return the finished batch of a run that was killed before its answers were moved out. Raises PenstockError."""
    from penstock.jobs.store import Store

    if not folder.exists():
        return None
    if not (folder / "jobs.db").exists():
        if {path.name for path in folder.iterdir()} - {"files", "lines", "lock"}:  # these alone: a run was killed at its start
            raise PenstockError(f"{folder} has files other than answers.", remedy="Name another --output.")
        return None
    with closing(Store(folder, max_bytes=MAX_BYTES)) as store:
        known = _known(file, store)
    return known if known is not None and known.is_ended else None


def _known(file: Path, store: Store) -> Batch | None:
    """Return the batch of an earlier run, or None. Raises PenstockError if it is of another input file."""
    known = store.batches(OWNER, KIND, limit=1)
    if not known:
        return None
    if (known[0].metadata or {}).get("sha256") != sha256_of(file):
        raise PenstockError(f"{store.folder} is of another file.", remedy="Remove it, or name another --output.")
    return known[0]


def _move_out(ended: Batch, folder: Path, output: Path, errors: Path) -> None:
    """Move a batch's answers to their final paths, and delete its folder. Can be repeated after the process was killed."""
    from penstock.jobs.store import discard

    with _disk_errors_of(folder):
        for file_id, path in ((ended.output_file, output), (ended.error_file, errors)):
            if file_id and (answers := folder / "files" / file_id).exists():
                _check_free(path)
                answers.replace(path)
        discard(folder)


async def _run(deployment: Deployment, file: Path, folder: Path) -> Batch:
    """Run the requests of a file to the end, and return the batch."""
    from tqdm import tqdm

    from penstock.config import ServerConfig
    from penstock.engine.state import EngineState
    from penstock.serve.app import create_app

    config = ServerConfig(jobs_dir=str(folder), jobs_bytes=MAX_BYTES, max_body_bytes=MAX_LINE_BYTES, page=False)
    app = create_app(deployment, config)
    parts: Parts = app.state.parts
    batches = parts.batches
    assert batches is not None, "the config has a folder"
    try:
        with _disk_errors_of(folder):
            batch, is_new = _batch_of(file, batches.store, " ".join(deployment.names))
            batches.start()
            if is_new:
                batch = await batches.create(batch)
        told = set[str]()
        with tqdm(desc="Lines", bar_format=_FORMAT, mininterval=0.1 if sys.stderr.isatty() else 60.0) as bar:
            while batches.is_running(batch):
                now = batches.current(batch)
                if now.errors and (message := now.errors[0]["message"]) not in told:
                    told.add(message)
                    tqdm.write(message, file=sys.stderr)
                bar.total = now.num_lines or None
                if (ends_s := batches.ends_s(batch)) is not None:
                    bar.set_postfix_str(time.strftime("ends %a %H:%M", time.localtime(ends_s)), refresh=False)
                bar.update(now.num_completed + now.num_failed - bar.n)
                if any(one.engine.state in (EngineState.FAILED, EngineState.STOPPED) for one in deployment.staying):
                    raise PenstockError(
                        "The engine has failed; the log has the cause.", remedy="Run the command again to go on."
                    )
                await asyncio.sleep(_LOOKED_EACH_S)
            ended = batches.store.batch(batch.id, OWNER, KIND)
            assert ended is not None, "it was created"
            bar.update(ended.num_completed + ended.num_failed - bar.n)
        return ended
    finally:
        ends = [upstream.close for upstream in parts.upstreams.values()]
        for end in (*parts.lifetime.stops, *parts.lifetime.closes, *ends):
            await end()


def _batch_of(file: Path, store: Store, models: str) -> tuple[Batch, bool]:
    """Return the batch of an earlier run, or a new one, and whether it is new. Raises as `_known`, and for other models."""
    from penstock.jobs.store import UPLOAD, Batch, File, new_id

    if (known := _known(file, store)) is not None:
        if (begun := (known.metadata or {}).get("models")) != models:
            raise PenstockError(
                f"{store.folder} was begun with {begun}, and this is {models}.", remedy="Name the same, or remove it."
            )
        click.echo("Going on where the last run ended.", err=True)
        store.content(known.input_file).unlink(missing_ok=True)
        store.content(known.input_file).symlink_to(file.absolute())  # both may have been moved since
        return known, False
    now_s, file_id = int(time.time()), new_id("file-")
    store.content(file_id).symlink_to(file.absolute())
    store.add(File(file_id, OWNER, file.name, UPLOAD, file.stat().st_size, now_s))
    made = Batch(
        id=new_id("batch_"),
        owner=OWNER,
        kind=KIND,
        url="",
        input_file=file_id,
        window_s=MAX_WINDOW_S,
        created_s=now_s,
        metadata={"sha256": sha256_of(file), "models": models},
    )
    return made, True
