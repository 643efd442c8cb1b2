"""The benchmark of the lab's client runs, and its last line has what it promises."""

import json
import sys

import client


def test_the_report_has_every_figure(monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setattr(client, "FIRST_MS", 2)
    monkeypatch.setattr(client, "GAP_MS", 1)
    client.main(["--requests", "40", "--repeat", "1"])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["benchmark"] == "client"
    assert report["open"]["requests_per_s"] > 0
    assert 0.3 < report["agree"]["tokens_per_s"] < 3
    assert report["memory"]["requests"] == 320
