"""The comparison of batching, and the job beside a client, with a canned server."""

from contextlib import closing

import pytest
from encoder_batching import LOADS, STRATEGIES, capacity_per_s, measured, plot
from encoder_contenders import Server
from encoder_mixed import ask, bulk_texts, do_job, rate_beside
from sessions import LoadError

from support.lab.canned import CannedServer, plain


def server_of(canned):
    server = Server.__new__(Server)
    server.url = canned.url
    return server


def test_padding_is_a_share_of_what_was_computed_for_the_texts_that_were_answered():
    padding = iter((30, 90))

    def respond(request):
        if "metrics" in request.line:
            return [
                plain(f"# TYPE penstock_padding_tokens_total counter\npenstock_padding_tokens_total {next(padding)}\n".encode())
            ]
        return [plain({"data": [{}], "usage": {"prompt_tokens": 4}})]

    with closing(CannedServer(respond)) as canned:
        found = measured(server_of(canned), ["a", "b"], rate=100, seconds=0.05, seed=0)
        asked = [request.json["input"] for request in canned.requests if "metrics" not in request.line]
    assert sorted(asked) == ["a", "a", "a", "b", "b"]
    assert found["padding"] == 60 / (60 + 5 * 4)
    assert found["late"] == 0
    assert 0 < found["p50, ms"] <= found["p99, ms"]


def test_a_text_that_is_refused_ends_the_measurement():
    with closing(CannedServer(lambda _: [plain({"error": {"message": "too long"}}, status="400 Bad Request")])) as canned:
        with pytest.raises(LoadError, match="400 too long"):
            capacity_per_s(server_of(canned), ["a"])
        with pytest.raises(LoadError, match="400 too long"):
            do_job(canned.url, ["a"])


def test_the_job_asks_for_every_text_once_and_none_is_like_another(monkeypatch):
    monkeypatch.setattr("encoder_mixed.BODY_TEXTS", 2)
    texts = bulk_texts(["a", "b"], 5)
    assert texts == ["0: a", "0: b", "1: a", "1: b", "2: a"]
    with closing(CannedServer(lambda _: [plain({"data": [{}], "usage": {}})])) as canned:
        assert do_job(canned.url, texts) > 0
        assert [request.json["input"] for request in canned.requests] == [texts[:2], texts[2:4], texts[4:]]
        assert canned.max_running == 1
        assert len(ask(canned.url, ["c"], rate=100, seconds=0.05).records) == 5


@pytest.mark.parametrize(("job_s", "rate"), [(39, 0), (29.5, 500), (20, 1000), (16, 1250)])
def test_the_job_is_rated_while_the_client_ran(job_s, rate):
    assert rate_beside(20_000, job_s, client_s=19, alone=1000) == pytest.approx(rate)


def test_every_strategy_has_a_line_in_the_plot(tmp_path):
    figures = {"texts/s": 1.0, "p50, ms": 2.0, "p99, ms": 3.0, "padding": 0.5, "late": 0}
    plot({(way, load): [figures] for way in STRATEGIES for load in LOADS}, tmp_path / "x.svg")
    drawn = (tmp_path / "x.svg").read_text()
    assert all(way in drawn for way in STRATEGIES)
