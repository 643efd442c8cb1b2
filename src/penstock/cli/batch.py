"""`penstock batch run`: answers a file of requests without a server. An interrupted run can be resumed.

The requests run as a batch of a server that nobody can reach. Its folder, OUT.job, is deleted at the end.
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from penstock.cli.options import EPILOG, GroupedCommand, config_options, models_argument, warn_of_unknown_variables
from penstock.types.errors import PenstockError, counted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.deploy.deployment import Deployment
    from penstock.jobs.store import Batch, Store
    from penstock.serve.jobs.runner import BatchRunner

KIND, OWNER = "command", ("", "")
MAX_WINDOW_S = 10 * 365 * 24 * 3600
_LOOKED_EACH_S = 0.2
_COMPONENTS = ("model", "kv", "lora", "scheduler", "backend", "sharing", "log")


@click.group()
def batch() -> None:
    """Answer files of requests."""


@batch.command(cls=GroupedCommand, epilog=EPILOG)
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@models_argument
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Default: FILE with .out.jsonl behind it."
)
@config_options(*_COMPONENTS)
def run(file: Path, words: tuple[str, ...], tables: Sequence[Mapping[str, object]], output: Path | None, **values: Any) -> None:
    """Answer the requests of FILE, in the form of OpenAI's batches, by one MODEL or several.

    \b
      {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...]}}

    Requests that begin alike run one after another, so the order of the answers is another one. Lines that could not be
    answered are in OUT.errors.jsonl. If the command is interrupted, run it again to resume.
    """
    from penstock.cli.serve import set_up_logging
    from penstock.config.several import configs_of
    from penstock.deploy.factory import start_deployment

    output = output or file.with_name(file.name + ".out.jsonl")
    errors, folder = output.with_name(output.name + ".errors.jsonl"), output.with_name(output.name + ".job")
    for path in (output, errors):
        if path.exists():
            raise PenstockError(f"{path} is there already.", remedy="Remove it, or name another one with --output.")
    if not any(values[key] for key in ("preset", "batching", "budget", "budget_args")):
        values["preset"] = "offline"
    configs = configs_of(values, words=words, tables=tables)
    set_up_logging(configs[0].log)
    warn_of_unknown_variables()
    deployment = start_deployment(configs)
    try:
        ended = asyncio.run(_run(deployment, file, folder))
    finally:
        deployment.close()
    for file_id, path in ((ended.output_file, output), (ended.error_file, errors)):
        if file_id:
            (folder / "files" / file_id).replace(path)
    shutil.rmtree(folder)
    if ended.errors:
        told = "\n".join(f"{file}:{error['line'] or 1}: {error['message']}" for error in ended.errors)
        raise PenstockError(f"{file} can't be run.\n{told}")
    usage = ended.usage
    click.echo(
        f"{counted(ended.num_completed, 'answer')} in {output}; {usage.get('input_tokens', 0)} tokens of prompts, of which "
        f"{usage.get('cached_tokens', 0)} were computed once for several; {usage.get('output_tokens', 0)} tokens of answers"
    )
    if ended.num_failed:
        raise PenstockError(f"{counted(ended.num_failed, 'line')} failed.", remedy=f"See {errors}.")


async def _run(deployment: Deployment, file: Path, folder: Path) -> Batch:
    """Run the requests of a file to the end, and return the batch."""
    from tqdm import tqdm

    from penstock.config import ServerConfig
    from penstock.serve.app import create_app

    config = ServerConfig(jobs_dir=str(folder), jobs_bytes=1 << 60, page=False)
    app = create_app(deployment, config)
    batches: BatchRunner = app.state.batches
    try:
        batch, is_new = _batch_of(file, batches.store)
        batches.start()
        if is_new:
            batch = await batches.create(batch)
        with tqdm(desc="Lines", unit=" line", disable=None) as bar:
            while batches.is_running(batch):
                now = batches.current(batch)
                bar.total = now.num_lines or None
                bar.update(now.num_completed + now.num_failed - bar.n)
                await asyncio.sleep(_LOOKED_EACH_S)
        ended = batches.store.batch(batch.id, OWNER, KIND)
        assert ended is not None, "it was created"
        return ended
    finally:
        for end in (*app.state.lifetime.stops, *app.state.lifetime.closes):
            await end()


def _batch_of(file: Path, store: Store) -> tuple[Batch, bool]:
    """Return the batch of an earlier run, or a new one, and whether it is new. Raises PenstockError for another file's."""
    from penstock.jobs.store import UPLOAD, Batch, File, new_id

    with file.open("rb") as data:
        digest = hashlib.file_digest(data, "sha256").hexdigest()
    for known in store.unfinished():
        if known.metadata != {"sha256": digest}:
            raise PenstockError(f"{store.folder} is of another file.", remedy="Remove it, or name another --output.")
        click.echo("Going on where the last run ended.", err=True)
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
        metadata={"sha256": digest},
    )
    return made, True
