"""The pages of incidents name what there is: the command, alerts, panels, settings and the picture of each."""

import re
from pathlib import Path

import incidents
import pytest

from penstock.obs.boards.alerts import ALERTS
from penstock.obs.boards.panels import BOARD

DOCS = Path(__file__).parents[2] / "docs"
MAX_PICTURE_BYTES = 25_000
PAGES = {page.stem: page.read_text(encoding="utf-8") for page in (DOCS / "incidents").glob("*.md")}
SETTINGS = (DOCS / "configuration.md").read_text(encoding="utf-8")


def test_each_page_is_an_incident_of_the_script():
    assert PAGES.keys() == incidents.INCIDENTS.keys()


@pytest.mark.parametrize("name", PAGES)
def test_a_page_names_its_command_its_settings_and_its_panels(name):
    page, incident = PAGES[name], incidents.INCIDENTS[name]
    assert f"python benchmarks/incidents.py {name}" in " ".join(page.split())
    flags = [word for word in (*incident.settings, *incident.wrong, *incident.right) if word.startswith("--")]
    flags += re.findall(r"--[a-z][\w-]+", page.split("python benchmarks")[0])
    assert {flag for flag in flags if f"`{flag}`" not in SETTINGS} == set()
    assert " ".join(incident.right) in page
    assert set(incident.panels) <= {entry.title for entry in BOARD if not isinstance(entry, str)}
    assert all(f"**{title}**" in page for title in incident.panels)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_names_alerts_that_there_are(name):
    named = set(re.findall(r"Penstock[A-Z]\w+", PAGES[name]))
    assert named
    assert named <= {alert.name for alert in ALERTS}


@pytest.mark.parametrize("name", PAGES)
def test_a_picture_is_there_and_small(name):
    [picture] = re.findall(r"!\[.+?\]\((.+?)\)", PAGES[name])
    assert 0 < (DOCS / "incidents" / picture).stat().st_size <= MAX_PICTURE_BYTES


def test_durations_of_rules_are_divided_and_nothing_else():
    rule = "rate(penstock_x[10m]) > 14.4 and rate(penstock_x[1h])\n  for: 2m\n  summary: tokens of model 3"
    hastened = incidents.hastened(rule)
    assert hastened == "rate(penstock_x[30s]) > 14.4 and rate(penstock_x[180s])\n  for: 6s\n  summary: tokens of model 3"


def test_a_picture_keeps_its_labels_and_loses_only_hundredths_of_points():
    svg = '<g id="text_1">\n <text style="x" x="1.25" transform="rotate(-0 1.25 2.75)">0.25</text>\n</g>'
    assert incidents.slim(svg) == '<g>\n<text style="x" x="1.2">0.25</text>\n</g>'
