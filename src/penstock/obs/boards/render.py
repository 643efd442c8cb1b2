"""Renders the dashboard, alerts, runbooks and deployment files as text. The output depends only on the arguments."""

from __future__ import annotations

import json
from dataclasses import asdict
from string import Template
from typing import Any

from penstock.obs.boards import files
from penstock.obs.boards.alerts import ALERTS
from penstock.obs.boards.panels import BOARD, Panel

_SOURCE = {"type": "prometheus", "uid": "penstock-prometheus"}


def render(target: str, runbooks: str, server: str = "http://127.0.0.1:8000") -> dict[str, str]:
    """Return path -> text of all files.

    `target`: host and port of the server, for Prometheus. `runbooks`: the address of their folder. `server`: the address of the
    server, for browsers.
    """
    entries = [{**asdict(alert), "url": json.dumps(f"{runbooks}/{alert.name}.md")} for alert in ALERTS]
    indented = [entry | {"query": entry["query"].replace("\n", "\n          ")} for entry in entries]
    rules = files.RULES + "".join([Template(files.ALERT).substitute(entry) for entry in indented])
    texts = {
        "prometheus.yaml": Template(files.PROMETHEUS).substitute(target=json.dumps(target)),
        "rules.yaml": rules,
        "datasource.yaml": Template(files.DATASOURCE).substitute(link=json.dumps(f"{server}/v1/requests/$${{__value.raw}}")),
        "dashboards.yaml": files.DASHBOARDS,
        "compose.yaml": Template(files.COMPOSE).substitute(),
        "keda.yaml": files.KEDA,
        "hpa.yaml": files.HPA,
    }
    return {
        **{name: files.EDIT + text for name, text in texts.items()},
        "penstock.json": json.dumps(_dashboard(), indent=1, ensure_ascii=False) + "\n",
        **{f"runbooks/{entry['name']}.md": Template(files.RUNBOOK).substitute(entry) for entry in entries},
    }


def _dashboard() -> dict[str, Any]:
    model = "label_values(penstock_requests_running, model)"
    variable = {
        "name": "model",
        "label": "Model",
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": model, "refId": "model"},
        "definition": model,
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
    }
    return {
        "uid": "penstock",
        "title": "Penstock",
        "schemaVersion": 41,
        "version": 1,
        "editable": False,
        "refresh": "5s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "tags": [],
        "annotations": {"list": []},
        "links": [],
        "templating": {"list": [variable]},
        "panels": _panels(),
    }


def _panels() -> list[dict[str, Any]]:
    """Return rows and panels with their places: three panels side by side."""
    placed: list[dict[str, Any]] = []
    x = y = 0
    for number, entry in enumerate(BOARD, start=1):
        if isinstance(entry, str):
            y += 8 if x else 0
            place = {"h": 1, "w": 24, "x": 0, "y": y}
            placed.append({"id": number, "type": "row", "title": entry, "collapsed": False, "gridPos": place, "panels": []})
            x, y = 0, y + 1
        else:
            placed.append({"id": number, "gridPos": {"h": 8, "w": 8, "x": x, "y": y}, **_panel(entry)})
            x, y = (x + 8) % 24, y + (8 if x == 16 else 0)
    return placed


def _panel(panel: Panel) -> dict[str, Any]:
    custom: dict[str, Any] = {"lineWidth": 1, "fillOpacity": 10, "showPoints": "never"}
    limits = {"min": 0}
    if panel.is_stacked:
        custom |= {"fillOpacity": 30, "stacking": {"mode": "normal"}}
        limits |= {"max": 1} if panel.unit == "percentunit" else {}
    targets = [
        {
            "refId": chr(ord("A") + idx),
            "datasource": _SOURCE,
            "expr": query,
            "legendFormat": legend,
            "exemplar": "_bucket" in query,
        }
        for idx, (query, legend) in enumerate(panel.queries)
    ]
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": _SOURCE,
        "fieldConfig": {"defaults": {"unit": panel.unit, **limits, "custom": custom}, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": targets,
    }
