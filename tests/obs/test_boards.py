"""The board and the alerts: every query names what the server writes, every alert has a runbook that leads somewhere."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from penstock.obs.boards.alerts import ALERTS, Alert
from penstock.obs.boards.panels import BOARD, Panel
from penstock.obs.boards.render import render
from support.board_queries import check_query

FILES = render("server:8000", "runbooks")
PANELS = [entry for entry in BOARD if isinstance(entry, Panel)]


@pytest.mark.parametrize(
    "query",
    [
        "penstock_no_such_metric",
        "rate(penstock_batch_size[5m])",  # a histogram has no series of its own name
        "penstock_request_success",
        'penstock_requests_waiting{cause="rows"}',
        "sum by (cause) (penstock_requests_waiting)",
        "sum by (reason) (penstock_requests_running)",
        "1 + 1",
    ],
)
def test_a_query_that_the_server_cannot_answer_is_refused(query: str) -> None:
    with pytest.raises(ValueError, match=re.escape(query)):
        check_query(query)


@pytest.mark.parametrize(
    "query",
    [
        'sum by (le) (rate(penstock_batch_size_bucket{model=~"penstock_x{y}",instance="a"}[5m]))',
        'up{job="penstock"} == 0',
        "sum by (instance, reason) (penstock_requests_waiting) / on (instance) process_resident_memory_bytes",
    ],
)
def test_a_query_that_it_can_answer_is_not(query: str) -> None:
    check_query(query)


def test_boards_and_alerts_query_what_the_server_has() -> None:
    board = json.loads(FILES["penstock.json"])
    [variable] = board["templating"]["list"]
    shown = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    for query in (variable["definition"], *shown, *[alert.query for alert in ALERTS]):
        check_query(query)


def test_every_file_can_be_read_and_is_the_same_every_time() -> None:
    assert render("server:8000", "runbooks") == FILES
    for name, text in FILES.items():
        assert text.endswith("\n")
        if name.endswith(".yaml"):
            assert yaml.safe_load(text), name
            assert text.startswith("# Written by"), name
    assert json.loads(FILES["penstock.json"])["title"] == "Penstock"


def test_panels_do_not_overlap_and_stand_below_their_question() -> None:
    panels = json.loads(FILES["penstock.json"])["panels"]
    assert [panel["title"] for panel in panels] == [entry if isinstance(entry, str) else entry.title for entry in BOARD]
    assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(panels)
    squares = set()
    for panel in panels:
        place = panel["gridPos"]
        mine = {(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])}
        assert not mine & squares, panel["title"]
        assert max(x for x, _ in mine) < 24
        squares |= mine


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel.title)
def test_a_legend_names_labels_of_its_query(panel: Panel) -> None:
    for query, legend in panel.queries:
        for label in re.findall(r"{{(\w+)}}", legend):
            assert f"by ({label})" in query


def test_the_share_of_targets_met_has_no_series_for_a_target_that_no_request_has() -> None:
    [panel] = [panel for panel in PANELS if panel.title == "Targets met"]
    [(query, _)] = panel.queries
    met, whole = query.split(" / ")
    assert whole == "(" + met.replace(',met="true"', "") + " > 0)"


def test_examples_are_asked_for_where_there_are_some() -> None:
    panels = json.loads(FILES["penstock.json"])["panels"]
    targets = [target for panel in panels for target in panel.get("targets", ())]
    assert {target["exemplar"] for target in targets if "_bucket" in target["expr"]} == {True}
    [source] = yaml.safe_load(FILES["datasource.yaml"])["datasources"]
    [link] = source["jsonData"]["exemplarTraceIdDestinations"]
    assert link == {"name": "request_id", "url": "http://127.0.0.1:8000/v1/requests/$${__value.raw}"}, "for browsers"


# Alerts


def test_every_alert_is_a_rule_with_a_runbook() -> None:
    [group] = yaml.safe_load(FILES["rules.yaml"])["groups"]
    desired, *rules = group["rules"]
    assert desired["record"] == yaml.safe_load(FILES["keda.yaml"])["spec"]["triggers"][0]["metadata"]["query"]
    assert [rule["alert"] for rule in rules] == [alert.name for alert in ALERTS]
    for rule, alert in zip(rules, ALERTS, strict=True):
        assert rule["expr"] == alert.query.replace("\n", " ")
        assert (rule["for"], rule["labels"]) == (alert.lasts, {"severity": alert.severity})
        assert rule["annotations"]["summary"] == alert.summary
        assert rule["annotations"]["runbook_url"] in FILES


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_a_runbook_says_what_it_means_how_to_see_it_and_what_to_change(alert: Alert) -> None:
    page = FILES[f"runbooks/{alert.name}.md"]
    for text in (alert.means, alert.look, alert.change, alert.query):
        assert len(text) > 20
        assert text in page
    assert alert.severity in ("critical", "warning")
    named = set(re.findall(r"\*\*(.+?)\*\*", page))
    assert named <= {panel.title for panel in PANELS}
    settings = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text(encoding="utf-8")
    flags = set(re.findall(r"`(--[\w-]+)", page))
    assert {flag for flag in flags if f"`{flag}`" not in settings} == set()
    labels = set(re.findall(r"\$labels\.(\w+)", alert.summary))
    assert all(label in re.search(r"by \((.*?)\)", alert.query)[1] for label in labels)  # type: ignore[index]


def test_the_board_names_flags_that_exist() -> None:
    settings = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text(encoding="utf-8")
    flags = {flag for panel in PANELS for flag in re.findall(r"--[\w-]+", panel.description)}
    assert flags
    assert {flag for flag in flags if f"`{flag}`" not in settings} == set()
