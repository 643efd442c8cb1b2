"""`penstock embed`: embeds a file of texts into a file of vectors. An interrupted run can be resumed.

Vectors are appended to OUT.part, and OUT.part.json names input, model and settings. At the end they are converted to OUT.
"""

from __future__ import annotations

import fcntl
import json
import re
from collections.abc import Generator, Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import click

from penstock.cli.files import check_regular, check_writable, sha256_of
from penstock.cli.options import (
    EPILOG,
    NOT_IN_THE_LAB,
    GroupedCommand,
    check_named,
    config_options,
    setting_keys,
    warn_of_unknown_variables,
    with_table,
)
from penstock.types.errors import PenstockError, Rejected, counted

if TYPE_CHECKING:
    from penstock.llm import LLM

FORMATS = ("npy", "jsonl", "parquet")
AT_ONCE = 2048
"""Texts between two writes, and so the most that an interruption loses."""
COPIED_ROWS = 1024
_COMPONENTS = ("model", "backend")
_NOT_HERE = ("model", *NOT_IN_THE_LAB, "experts_on_disk")


@click.command(cls=GroupedCommand, epilog=EPILOG)
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--model",
    default="minilm",
    envvar="PENSTOCK_MODEL",
    show_default=True,
    help="Catalogue name, .gguf file, directory or hf:org/repo.",
)
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Default: FILE with .npy appended.")
@click.option("--field", help="Key of the text in each object of a .jsonl FILE.  [default: text]")
@click.option("--prompt-name", help="Prompt of the model's files before each text, such as query; by default the files' own.")
@click.option("--dimensions", type=click.IntRange(1), help="Cut vectors to this size; unit vectors are normalised again.")
@click.option("--truncate", is_flag=True, help="Cut texts that are too long at their ends; otherwise one is an error.")
@config_options(*_COMPONENTS, without=_NOT_HERE)
def embed(
    file: Path,
    output: Path | None,
    field: str | None,
    prompt_name: str | None,
    dimensions: int | None,
    truncate: bool,
    **values: Any,
) -> None:
    """Embed the texts of FILE: one in each line of a .txt, or of a .jsonl's objects.

    \b
      penstock embed notes.txt
      penstock embed questions.jsonl --field question --prompt-name query -o questions.parquet

    The output's extension sets its format: .npy is an array [texts, dimensions] of float32; .jsonl and .parquet have each
    text with its vector. If the command is interrupted, run it again to resume.
    """
    from penstock.llm import LLM

    warn_of_unknown_variables()
    check_named()
    values = with_table(values)
    if file.suffix.lower() == ".json":
        raise click.UsageError(f"{file} is one JSON value. Write an object in each line, and name the file .jsonl.")
    if field is not None and not _has_objects(file):
        raise click.UsageError(f"--field {field}: only a .jsonl file has objects, and {file} is read as text.")
    field = field or "text"
    output = output or file.with_name(file.name + ".npy")
    if output.suffix[1:] not in FORMATS:
        raise click.UsageError(f"--output {output}: its ending must be one of {', '.join('.' + name for name in FORMATS)}.")
    if output.suffix == ".parquet":
        _import_pyarrow()
    if output.exists():
        raise PenstockError(f"{output} is there already.", remedy="Remove it, or name another one with --output.")
    check_regular(file)
    check_writable(output)
    num_texts = sum(1 for _ in _texts(file, field))
    if not num_texts:
        raise PenstockError(f"{file} has no text.", remedy="Name a file with a text in each line.")
    with LLM(values["model"], **{key: values[key] for key in setting_keys(*_COMPONENTS) if key not in _NOT_HERE}) as llm:
        asked = {"prompt_name": prompt_name, "dimensions": dimensions, "truncate": truncate, "field": field}
        about = {"input_sha256": sha256_of(file), "model": llm.fingerprint, "max_model_len": llm.max_model_len, **asked}
        with _Part(output, about) as part:
            _embed_all(llm, file, field, num_texts, part, prompt_name, dimensions, truncate)
            part.write(output, file, field)
    click.echo(f"{counted(num_texts, 'text')} in {output}")


def _embed_all(
    llm: LLM,
    file: Path,
    field: str,
    num_texts: int,
    part: _Part,
    prompt_name: str | None,
    dimensions: int | None,
    truncate: bool,
) -> None:
    import numpy as np
    from tqdm import tqdm

    done = part.num_rows
    if done:
        click.echo(f"{counted(done, 'text')} were embedded before; resuming.", err=True)
    keep = -1 if truncate else None
    with (
        closing(_texts(file, field)) as texts_of_file,
        tqdm(total=num_texts, initial=done, desc="Texts", unit=" text", disable=None) as bar,
    ):
        left = islice(texts_of_file, done, None)
        while texts := list(islice(left, AT_ONCE)):
            try:
                answers = llm.embed(
                    texts, prompt_name=prompt_name, dimensions=dimensions, truncate_prompt_tokens=keep, use_tqdm=False
                )
            except Rejected as error:
                found = re.fullmatch(r"texts\[(\d+)\]", error.param or "")
                if found is None:
                    raise
                detail = error.detail.replace(f"'{error.param}'", f"Text {part.num_rows + int(found[1]) + 1} of {file}")
                raise PenstockError(detail.split(". ")[0] + ".", remedy="Shorten it, or add --truncate.") from None
            part.append(np.array([answer.outputs.embedding for answer in answers], np.float32))
            bar.update(len(texts))


class _Part:
    """The file OUT.part with the vectors computed so far. A context manager, which keeps the file locked."""

    def __init__(self, output: Path, about: dict[str, Any]) -> None:
        """Open OUT.part, or resume it. Raises PenstockError if it is locked, or is from another input, model or setting."""
        self._path = output.with_name(output.name + ".part")
        self._about_path = output.with_name(output.name + ".part.json")
        self._about = about
        self.num_rows = 0
        self._width = 0
        self._file = self._path.open("ab")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._find_rows()
        except BlockingIOError:
            self._file.close()
            raise PenstockError(f"Another run writes {self._path}.", remedy="Wait for it, or name another output.") from None
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if not self.num_rows:
            self._path.unlink(missing_ok=True)
        self._file.close()

    def _find_rows(self) -> None:
        about = self._about
        if not self._about_path.exists():
            self._file.truncate(0)
            return
        try:
            left = json.loads(self._about_path.read_text())
            self._width = left.pop("width")
        except (ValueError, AttributeError, KeyError, TypeError):
            left = None
        if left != about or not isinstance(self._width, int) or self._width < 1:
            remedy = f"Remove it and {self._path.name}, or name another output."
            raise PenstockError(f"{self._about_path} is of another input, model or setting.", remedy=remedy)
        self.num_rows = self._path.stat().st_size // (4 * self._width)
        self._file.truncate(4 * self._width * self.num_rows)

    def append(self, vectors: Any) -> None:
        if not self._width:
            self._width = vectors.shape[1]
            self._about_path.write_text(json.dumps({**self._about, "width": self._width}))
        self._file.write(vectors.tobytes())
        self._file.flush()
        self.num_rows += len(vectors)

    def write(self, output: Path, file: Path, field: str) -> None:
        """Convert the vectors to the final `output`, and remove OUT.part."""
        import numpy as np

        vectors = np.memmap(self._path, np.float32, "r", shape=(self.num_rows, self._width))
        made = output.with_name(output.name + ".made")
        if output.suffix == ".npy":
            with made.open("wb") as out:
                np.save(out, vectors)
        elif output.suffix == ".jsonl":
            with made.open("w", encoding="utf-8") as out:
                for text, vector in zip(_texts(file, field), vectors, strict=True):
                    out.write(json.dumps({"text": text, "embedding": vector.tolist()}, ensure_ascii=False) + "\n")
        else:
            with closing(_texts(file, field)) as texts:
                _write_parquet(made, texts, vectors)
        made.replace(output)
        del vectors
        self._about_path.unlink()
        self._path.unlink()


def _import_pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise PenstockError(
            "A .parquet file needs pyarrow, which is not installed.", remedy="pip install pyarrow, or write .npy or .jsonl."
        ) from None
    return pyarrow


def _write_parquet(path: Path, texts: Iterator[str], vectors: Any) -> None:
    pyarrow = _import_pyarrow()
    width = vectors.shape[1]
    schema = pyarrow.schema([("text", pyarrow.string()), ("embedding", pyarrow.list_(pyarrow.float32(), width))])
    with pyarrow.parquet.ParquetWriter(path, schema) as writer:
        for start in range(0, len(vectors), COPIED_ROWS):
            flat = pyarrow.array(vectors[start : start + COPIED_ROWS].ravel())
            some = pyarrow.array(list(islice(texts, COPIED_ROWS)), pyarrow.string())
            columns = [some, pyarrow.FixedSizeListArray.from_arrays(flat, width)]
            writer.write_table(pyarrow.table(columns, schema=schema))


def _has_objects(file: Path) -> bool:
    return file.suffix.lower() == ".jsonl"


def _texts(file: Path, field: str) -> Generator[str]:
    with file.open("rb") as lines:
        for number, data in enumerate(lines, 1):
            try:
                line = data.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError:
                raise PenstockError(f"{file}:{number} is not UTF-8 text.", remedy="Convert it, e.g. with iconv.") from None
            if not line.strip():
                if _has_objects(file):
                    continue
                raise PenstockError(f"{file}:{number} is blank, and a blank line has no vector.", remedy="Remove blank lines.")
            if not _has_objects(file):
                yield line.rstrip("\r\n")
                continue
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                raise PenstockError(f"{file}:{number} is not JSON.", remedy="Write one object in each line.") from None
            text = value.get(field) if isinstance(value, dict) else None
            if not isinstance(text, str) or not text:
                raise PenstockError(f"{file}:{number} has no text in {field!r}.", remedy="Name the key with --field.")
            try:
                text.encode()
            except UnicodeEncodeError:
                remedy = "Write the whole character, or remove it."
                raise PenstockError(f"{file}:{number} has half of a surrogate pair.", remedy=remedy) from None
            yield text
