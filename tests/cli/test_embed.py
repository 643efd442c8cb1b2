"""`penstock embed`, with a tiny encoder in the reference backend."""

from __future__ import annotations

import fcntl
import json
import locale
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from penstock.cli import embed as command
from penstock.llm import LLM
from penstock.types.errors import PenstockError
from support.parity.encoder_cases import ENCODERS, write_encoder

TEXTS = [f"text {i} " + "abc" * (i % 3) for i in range(9)]
Embed = Callable[..., Result]


@pytest.fixture(scope="module")
def tiny_encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT with vectors of 72 numbers."""
    return write_encoder(ENCODERS["bert_gguf"], tmp_path_factory.mktemp("encoder"))


@pytest.fixture
def embed(tiny_encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Embed:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.txt").write_text("\n".join(TEXTS) + "\n")
    (tmp_path / "in.jsonl").write_text("\n\n".join(json.dumps({"q": text}) for text in TEXTS))

    def run(*arguments: str) -> Result:
        options = ("--model", str(tiny_encoder), "--backend", "reference")
        return CliRunner().invoke(command.embed, [*arguments, *options])

    return run


@pytest.fixture(scope="module")
def vectors(tiny_encoder: Path) -> np.ndarray:
    with LLM(tiny_encoder, backend="reference") as llm:
        return np.array([answer.outputs.embedding for answer in llm.embed(TEXTS)], np.float32)


def test_lines_become_rows(embed: Embed, tmp_path: Path, vectors: np.ndarray) -> None:
    result = embed("in.txt")
    assert result.exit_code == 0, result.output
    assert "9 texts in in.txt.npy" in result.output
    assert np.array_equal(np.load(tmp_path / "in.txt.npy"), vectors)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "in.txt", "in.txt.npy"]


def test_a_named_model_has_the_settings_of_its_table(embed: Embed, tiny_encoder: Path, tmp_path: Path) -> None:
    table = f'[[models]]\nmodel = "{tiny_encoder}"\nserved_model_name = "emb"\npooling = "last"\nbackend = "reference"\n'
    (tmp_path / "p.toml").write_text(table)
    result = CliRunner().invoke(command.embed, ["in.txt", "--config", "p.toml", "--model", "emb"])
    assert result.exit_code == 0, result.exception
    assert embed("in.txt", "-o", "last.npy", "--pooling", "last").exit_code == 0
    assert np.array_equal(np.load(tmp_path / "in.txt.npy"), np.load(tmp_path / "last.npy"))


def test_objects_become_objects(embed: Embed, tmp_path: Path, vectors: np.ndarray) -> None:
    assert embed("in.jsonl", "--field", "q", "-o", "out.jsonl").exit_code == 0
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["text"] for row in rows] == TEXTS
    assert np.array_equal(np.array([row["embedding"] for row in rows], np.float32), vectors)


@pytest.mark.parametrize("name", ["in.txt", "in.jsonl"])
def test_a_byte_order_mark_is_no_text(embed: Embed, tmp_path: Path, vectors: np.ndarray, name: str) -> None:
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + (tmp_path / name).read_bytes())
    options = ("--field", "q") if name.endswith("l") else ()
    result = embed(name, *options, "-o", "out.npy")
    assert result.exit_code == 0, result.exception
    assert np.array_equal(np.load(tmp_path / "out.npy"), vectors)


def test_texts_are_written_in_utf_8_whatever_the_locale(embed: Embed, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("für alle", encoding="utf-8")
    own = locale.setlocale(locale.LC_CTYPE)
    locale.setlocale(locale.LC_CTYPE, "C")
    try:
        assert embed("in.txt", "-o", "out.jsonl").exit_code == 0
    finally:
        locale.setlocale(locale.LC_CTYPE, own)
    assert json.loads((tmp_path / "out.jsonl").read_text(encoding="utf-8"))["text"] == "für alle"


def test_what_was_stopped_goes_on(embed: Embed, tmp_path: Path, vectors: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    """After four texts, and a part of the next vector, the rest is embedded, and no text twice."""
    monkeypatch.setattr(command, "AT_ONCE", 4)
    asked: list[str] = []
    own = LLM.embed

    def fail_later(llm: LLM, texts: list[str], **options: Any) -> object:
        if len(asked) == 4:
            raise PenstockError("the power is gone", remedy="")
        asked.extend(texts)
        return own(llm, texts, **options)

    monkeypatch.setattr(LLM, "embed", fail_later)
    result = embed("in.txt")
    assert isinstance(result.exception, PenstockError)
    opened = [fd.resolve() for fd in Path("/proc/self/fd").iterdir() if fd.exists()]
    assert tmp_path / "in.txt" not in opened, "whoever keeps the error keeps no file open"
    with (tmp_path / "in.txt.npy.part").open("ab") as part:
        part.write(b"\0" * 7)
    monkeypatch.setattr(LLM, "embed", lambda llm, texts, **options: asked.extend(texts) or own(llm, texts, **options))
    result = embed("in.txt")
    assert result.exit_code == 0, result.output
    assert asked == TEXTS
    assert np.array_equal(np.load(tmp_path / "in.txt.npy"), vectors)


@pytest.mark.parametrize("about", ['{"input_sha256": "other", "width": 72}', "{", "[]", "{}"])
def test_a_part_of_another_run_is_not_mixed_in(embed: Embed, tmp_path: Path, about: str) -> None:
    (tmp_path / "in.txt.npy.part.json").write_text(about)
    (tmp_path / "in.txt.npy.part").write_bytes(b"\0" * 288)
    assert "of another input, model or setting" in str(embed("in.txt").exception)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("in.jsonl",), r"in\.jsonl:1 has no text in 'text'"),
        (("in.txt", "-o", "in.jsonl"), "is there already"),
        (("long.txt",), r"Text 2 of long\.txt has \d+ tokens"),
        (("empty.txt",), "has no text"),
        (("gap.txt",), r"gap\.txt:2 is blank"),
        (("bytes.txt",), r"bytes\.txt:1 is not UTF-8"),
        (("half.jsonl",), r"half\.jsonl:2 has half of a surrogate pair"),
    ],
)
def test_what_can_not_be_embedded_is_named(embed: Embed, tmp_path: Path, arguments: tuple[str, ...], complaint: str) -> None:
    (tmp_path / "long.txt").write_text("short\n" + "long " * 400)
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "gap.txt").write_text("one\n \ntwo\n")
    (tmp_path / "bytes.txt").write_bytes(b"\xff\n")
    (tmp_path / "half.jsonl").write_text('{"text": "one", "number": NaN}\n{"text": "a \\ud83d"}\n')
    result = embed(*arguments)
    with pytest.raises(PenstockError, match=complaint):
        raise result.exception or AssertionError(result.output)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("in.txt", "-o", "absent/out.npy"), "can't be written"),
        (("in.jsonl",), "has no text in 'text'"),
        (("empty.txt",), "has no text"),
        (("/dev/null",), "not a regular file"),
    ],
)
def test_wrong_files_are_named_before_the_model_is_loaded(
    embed: Embed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], complaint: str
) -> None:
    (tmp_path / "empty.txt").write_text("")
    monkeypatch.setattr("penstock.llm.start_model", None)
    with pytest.raises(PenstockError, match=complaint):
        raise embed(*arguments).exception or AssertionError


def test_two_runs_do_not_write_one_output(embed: Embed, tmp_path: Path, vectors: np.ndarray) -> None:
    with (tmp_path / "in.txt.npy.part").open("ab") as part:
        fcntl.flock(part, fcntl.LOCK_EX)
        with pytest.raises(PenstockError, match="Another run writes"):
            raise embed("in.txt").exception or AssertionError
    assert embed("in.txt").exit_code == 0
    assert np.array_equal(np.load(tmp_path / "in.txt.npy"), vectors)


def test_a_longer_limit_is_another_setting(embed: Embed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "AT_ONCE", 4)
    own, calls = LLM.embed, iter(range(2))
    monkeypatch.setattr(LLM, "embed", lambda llm, texts, **options: own(llm, texts, **options) if not next(calls) else 1 / 0)
    assert isinstance(embed("in.txt").exception, ZeroDivisionError)
    monkeypatch.setattr(LLM, "embed", own)
    assert "of another input, model or setting" in str(embed("in.txt", "--max-model-len", "40").exception)
    assert "of another input, model or setting" in str(embed("in.txt", "--pooling", "last").exception)
    assert embed("in.txt").exit_code == 0


@pytest.mark.parametrize("arguments", [("in.txt", "--field", "q"), ("in.json",)])
def test_a_field_is_of_objects_in_lines(embed: Embed, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    (tmp_path / "in.json").write_text('{"q": "one"}')
    result = embed(*arguments)
    assert result.exit_code == 2
    assert ".jsonl" in result.output


def test_long_texts_are_cut_if_that_is_asked_for(embed: Embed, tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("short\n" + "long " * 400)
    assert embed("long.txt", "--truncate", "--dimensions", "8").exit_code == 0
    found = np.load(tmp_path / "long.txt.npy")
    assert found.shape == (2, 8)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1.0, rtol=1e-5)


def test_an_ending_that_is_no_format_is_wrong_usage(embed: Embed) -> None:
    result = embed("in.txt", "-o", "out.csv")
    assert result.exit_code == 2
    assert ".npy, .jsonl, .parquet" in result.output
