"""`penstock index`, with a tiny encoder."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from penstock.cli.index import index
from penstock.llm import LLM
from penstock.search.index import Reader
from penstock.types.errors import ConfigError
from support.parity.encoder_cases import ENCODERS, write_encoder

TEXT = "Red is a colour."


@pytest.fixture
def encoder(tmp_path: Path) -> Path:
    folder = write_encoder(ENCODERS["bert"], tmp_path / "encoder")
    prompts = {"query": "query: ", "passage": "passage: "}
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": prompts, "default_prompt_name": "query"}))
    return folder


def test_passages_are_embedded_as_passages_and_a_second_run_reads_what_is_new(encoder: Path, tmp_path: Path) -> None:
    documents, file = tmp_path / "documents", tmp_path / "documents.index"
    documents.mkdir()
    (documents / "red.txt").write_text(TEXT)
    words = [str(documents), "-o", str(file), "--embedder", str(encoder)]
    first = CliRunner().invoke(index, words)
    assert "1 file new or changed, 0 as they were, 0 gone; 1 passages." in first.output, first.output
    (documents / "blue.txt").write_text("Blue is another.")
    assert "1 file new or changed, 1 as they were, 0 gone; 2 passages." in CliRunner().invoke(index, words).output
    with LLM(encoder) as llm:
        vectors = [llm.embed(TEXT, prompt_name=name)[0].outputs.embedding for name in ("passage", "query")]
    reader = Reader(file)
    scores = [reader.nearest(np.array([vector], np.float32), 1)[0][0].score for vector in vectors]
    reader.close()
    assert scores[0] == pytest.approx(1.0, abs=1e-5)
    assert scores[1] < 0.9999


def test_documents_that_differ_at_the_end_of_a_long_passage_alone_have_different_vectors(encoder: Path, tmp_path: Path) -> None:
    documents, file = tmp_path / "documents", tmp_path / "documents.index"
    documents.mkdir()
    for name in "ab":
        (documents / f"{name}.txt").write_text("0x4f_" * 100 + name)
    result = CliRunner().invoke(index, [str(documents), "-o", str(file), "--embedder", str(encoder)])
    assert result.exit_code == 0, result.exception
    reader = Reader(file)
    with LLM(encoder) as llm:
        [first] = llm.embed("a", prompt_name="passage")
        found = reader.nearest(np.array([first.outputs.embedding], np.float32), reader.num_passages)[0]
        assert max(llm.num_tokens([hit.as_read for hit in found], prompt_name="passage")) <= llm.max_model_len
    reader.close()
    assert sum([len(hit.text) for hit in found]) == 2 * 501
    ends = {hit.path: hit.score for hit in found if hit.text[-1] in "ab"}
    assert ends["a.txt"] != ends["b.txt"]


@pytest.mark.parametrize("text", [None, " "])
def test_a_folder_without_text_is_an_error_and_leaves_no_index(
    encoder: Path, tmp_path: Path, text: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    documents, file = tmp_path / "documents", tmp_path / "a.index"
    documents.mkdir()
    if text is not None:
        (documents / "a.txt").write_text(text)
    words = [str(documents), "-o", str(file), "--embedder", str(encoder)]
    with pytest.raises(ConfigError, match="No text was found in"):
        index.main(words, standalone_mode=False)
    assert capsys.readouterr().out == ""
    assert not file.exists()


def test_an_index_stays_if_its_documents_lose_their_text(encoder: Path, tmp_path: Path) -> None:
    documents, file = tmp_path / "documents", tmp_path / "a.index"
    documents.mkdir()
    words = [str(documents), "-o", str(file), "--embedder", str(encoder)]
    for text in (TEXT, " "):
        (documents / "a.txt").write_text(text)
        CliRunner().invoke(index, words)
    reader = Reader(file)
    assert reader.num_passages == 0
    reader.close()
