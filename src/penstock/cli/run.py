"""`penstock run`: answers one prompt on stdout. The prompt comes from the command line, a pipe or both."""

from __future__ import annotations

import errno
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from penstock.cli.options import EPILOG, GroupedCommand, check_named, is_given, model_option, tables_of_file, with_table
from penstock.cli.talk import CUT_OFF, NotEmpty, Session, check_text, stats_line, talk_options
from penstock.config.several import find_table
from penstock.types.errors import ModelError, PenstockError

if TYPE_CHECKING:
    from penstock.inprocess import StructuredOutputsParams


@click.command(cls=GroupedCommand, epilog=EPILOG)
@click.argument("words", nargs=-1, metavar="[MODEL] PROMPT")
@talk_options
@click.option(
    "--json-schema", type=click.Path(path_type=Path), metavar="FILE", help="The answer is JSON that follows the schema in FILE."
)
@click.option("--regex", type=NotEmpty(), metavar="REGEX", help="The answer matches REGEX from its beginning to its end.")
@click.option("--raw", is_flag=True, help="Continue the text; no chat template.")
@model_option
def run(words: tuple[str, ...], **values: Any) -> None:
    """Answer one PROMPT, streaming to stdout.

    Text from a pipe is the prompt, or is appended to it:

    \b
      penstock run "Name three rivers."
      cat notes.txt | penstock run "Summarise:"
      cat notes.txt | penstock run smollm2:135m
      penstock run --regex "yes|no" "Is the Rhine a river?"

    A single argument is the MODEL if it names one; the prompt then comes from the pipe.

    With --json-schema or --regex, the exit status is 1 if the answer is cut off.
    """
    if values["raw"]:
        _refuse_of_chats("system", "chat_template")
    if values["json_schema"] is not None and values["regex"] is not None:
        raise click.UsageError("--json-schema and --regex both say what the answer is: leave one of them out.")
    piped = "" if sys.stdin.isatty() else _read_pipe()
    model, prompt = split_words(words, tables_of_file())
    if model is not None:
        if is_given("model"):
            raise click.UsageError("The model is given twice: as an argument and with --model.")
        values["model"] = model
    else:
        check_named()
    text = "\n\n".join(part for part in (prompt, piped.strip("\n")) if part.strip())
    if not text:
        named = f"{model} names a model; " if model is not None else ""
        raise click.UsageError(f"Missing prompt: {named}give one as an argument or through a pipe.")
    check_text("The prompt", text)
    check_text("--system", values["system"])
    _answer(text, with_table(values))


def _refuse_of_chats(*names: str) -> None:
    """Raise UsageError if an option in `names`, which only concerns chats, is used with --raw."""
    for name in names:
        if is_given(name):
            raise click.UsageError(f"--{name.replace('_', '-')} has no effect with --raw: leave one of them out.")


def split_words(words: Sequence[str], tables: Sequence[Mapping[str, object]] = ()) -> tuple[str | None, str]:
    """Split the positional arguments into (model or None, prompt). A model may be one of the [[models]] `tables`."""
    if len(words) > 2:
        raise click.UsageError("Too many arguments: put the prompt in quotes.")
    if len(words) == 2:
        return words[0], words[1]
    if not words:
        return None, ""
    is_model = find_table(words[0], tables) is not None or _names_a_model(words[0])
    return (words[0], "") if is_model else (None, words[0])


def _read_pipe() -> str:
    try:
        return sys.stdin.buffer.read().decode()
    except OSError as error:
        if error.errno == errno.EBADF:  # `nohup` opens stdin for writing only
            return ""
        raise
    except UnicodeDecodeError as error:
        raise PenstockError(
            f"What came through the pipe is not UTF-8 text (byte {error.start}).", remedy="Convert it, e.g. with iconv."
        ) from None


def _names_a_model(word: str) -> bool:
    from penstock.models.catalog import resolve

    try:
        resolve(word, Path())  # any cache folder will do
    except (ModelError, OSError, ValueError):  # A prompt may be no valid path.
        return False
    return True


def _structure(values: dict[str, Any]) -> StructuredOutputsParams | None:
    from penstock.inprocess import StructuredOutputsParams

    path: Path | None = values["json_schema"]
    if path is not None:
        try:
            return StructuredOutputsParams(json=path.expanduser().read_text("utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            remedy = "Name a file with a JSON schema, in UTF-8."
            raise PenstockError(f"--json-schema: {path} can't be read: {error}.", remedy=remedy) from None
    return None if values["regex"] is None else StructuredOutputsParams(regex=values["regex"])


def _answer(text: str, values: dict[str, Any]) -> None:
    structure = _structure(values)
    with Session(values, structure) as session:
        if values["raw"]:
            session.ask_raw(text)
        else:
            system = [{"role": "system", "content": values["system"]}] if values["system"] else []
            session.ask_chat([*system, {"role": "user", "content": text}])
        print(flush=True)
        answer = session.answer
        is_cut_off = answer is not None and answer.outputs[0].finish_reason == "length"
        if is_cut_off:
            print(CUT_OFF, file=sys.stderr)
        if values["stats"] and answer is not None:
            print(stats_line(answer), file=sys.stderr)
    if is_cut_off and structure is not None:
        sys.exit(1)  # a script must not take half an answer
