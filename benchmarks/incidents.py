"""Three incidents of docs/incidents, reproduced: a server, its load, a real Prometheus with our alerts, and the doctor.

    python benchmarks/incidents.py thrash          # or greedy-key, slow-tier; needs prometheus and penstock[lab]

A server has the wrong setting, then the right one, and the same clients ask both for `--seconds`. The durations in the rendered
alerts are divided by `HASTE`. The picture is drawn from the queries of the board, as there is no Grafana here. The last line
printed is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from printed import origin, table
from processes import Contender, started

from penstock.lab.client import SendOptions, send
from penstock.lab.pacing import Pace
from penstock.lab.plots import Axis, Panel, Series, draw
from penstock.lab.records import End, Record
from penstock.lab.target import Target
from penstock.lab.workload import Job, Workload
from penstock.models.catalog import DEFAULT_MODEL
from penstock.obs.boards.panels import BOARD
from penstock.obs.boards.panels import Panel as BoardPanel
from penstock.obs.boards.render import render

HASTE = 20
SLOW_DISK = """\
import os, sys, time
def slowed(call):
    def slow(fd, *arguments):
        num_bytes = call(fd, *arguments)
        if "/slow/" in os.readlink(f"/proc/self/fd/{{fd}}"):
            time.sleep(num_bytes / {bytes_per_s})
        return num_bytes
    return slow
os.preadv, os.pwritev = slowed(os.preadv), slowed(os.pwritev)
from penstock.cli.main import main
main()
"""
"""The tier's file is read and written by these two calls alone, in a thread that does nothing else."""
KEYS = {"batch": "key-of-batch", "alice": "key-of-alice"}
UNITS = {"s": "seconds", "percentunit": "share", "reqps": "per second"}
TEXT = "Shall I compare thee to a summer's day? Thou art more lovely and more temperate. "


@dataclass(frozen=True, slots=True)
class Users:
    count: int
    prompt_tokens: int
    """About so many."""
    answer_tokens: int
    key: str = ""
    topics: int = 0
    """Prompts are one of so many texts, again and again. 0: all differ."""

    def jobs(self) -> list[Job]:
        text = TEXT * (self.prompt_tokens // 20)
        topics = self.topics or 10_000
        return [
            Job(
                arrival_ns=0,
                num_prompt_tokens=0,
                num_output_tokens=self.answer_tokens,
                prompt=f"{n % topics} {self.key} {text}",
            )
            for n in range(10_000)
        ]


@dataclass(frozen=True, slots=True)
class Incident:
    settings: Sequence[str]
    wrong: Sequence[str]
    right: Sequence[str]
    users: Sequence[Users]
    panels: Sequence[str]
    """Titles of the board's panels that tell it."""
    counts: Mapping[str, str]
    """Name -> PromQL of a figure at the end of a run."""
    disk_bytes_per_s: float = 0.0
    """Speed of files in a folder `slow`. 0: as fast as the disk is."""
    doctor_key: str = ""


AGAIN = "sum(penstock_recomputed_tokens_total) / sum(penstock_batch_tokens_sum)"
INCIDENTS = {
    "thrash": Incident(
        settings=("--max-num-seqs", "16"),
        wrong=("--kv-cache-memory", "24MiB"),
        right=("--kv-cache-memory", "96MiB"),
        users=[Users(16, prompt_tokens=60, answer_tokens=256)],
        panels=("KV cache blocks", "Preemptions", "Work done twice"),
        counts={
            "preemptions": "sum(penstock_preemptions_total)",
            "tokens computed again": "sum(penstock_recomputed_tokens_total)",
            "share of the work": AGAIN,
        },
    ),
    "greedy-key": Incident(
        settings=("--max-num-seqs", "4"),
        wrong=(),
        right=("--policy", "fair"),
        users=[
            Users(48, prompt_tokens=60, answer_tokens=64, key="batch"),
            Users(2, prompt_tokens=60, answer_tokens=64, key="alice"),
        ],
        panels=("Wait of a request, by reason", "Queue delay", "Tokens by key"),
        counts={f"tokens of {name}": f'sum(penstock_tenant_tokens_total{{tenant="{name}"}})' for name in KEYS},
        doctor_key="alice",
    ),
    "slow-tier": Incident(
        settings=("--kv-cache-memory", "24MiB", "--max-num-seqs", "4"),
        wrong=("--kv-disk-size", "1GiB", "--kv-disk-path", "slow"),
        right=("--kv-disk-size", "1GiB", "--kv-disk-path", "fast"),
        users=[Users(6, prompt_tokens=400, answer_tokens=16, topics=24)],
        panels=("Wait of a request, by reason", "Blocks to and from the tiers"),
        counts={
            "seconds of waiting for the tier": 'sum(penstock_queue_wait_seconds_total{reason="loading"})',
            "blocks loaded": 'sum(penstock_kv_disk_blocks_total{direction="loaded"})',
            "blocks declined": "sum(penstock_kv_disk_declined_blocks_total)",
            "blocks dropped": "sum(penstock_kv_disk_dropped_blocks_total)",
        },
        disk_bytes_per_s=12e6,
    ),
}


class Prometheus:
    def __init__(self, url: str, process: subprocess.Popen[bytes]) -> None:
        self._url, self._process = url, process

    def scrape(self, folder: Path, port: int | None) -> None:
        aim(folder, port)
        self._process.send_signal(signal.SIGHUP)

    def ask(self, path: str, **query: object) -> Any:
        with urllib.request.urlopen(f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(query)}", timeout=60) as answer:
            return json.load(answer)["data"]["result"]

    def value(self, query: str) -> float:
        return max((float(one["value"][1]) for one in self.ask("query", query=query)), default=0.0)

    def over(
        self, query: str, begin_s: float, end_s: float, step_s: int = 1
    ) -> list[tuple[dict[str, str], list[tuple[float, float]]]]:
        """Labels of each series, and its points: seconds since the begin, value."""
        found = self.ask("query_range", query=query, start=begin_s, end=end_s, step=step_s)
        return [(one["metric"], [(at_s - begin_s, float(value)) for at_s, value in one["values"]]) for one in found]


def hastened(rules: str) -> str:
    """Divide all durations of the rules."""
    return re.sub(r"\b(\d+)([mh])\b", lambda span: f"{int(span[1]) * {'m': 60, 'h': 3600}[span[2]] // HASTE}s", rules)


@contextmanager
def scraping(folder: Path) -> Iterator[Prometheus]:
    """A Prometheus with the alerts, which has nothing to scrape yet."""
    (folder / "rules.yaml").write_text(hastened(render("", "runbooks")["rules.yaml"]))
    aim(folder, None)
    words = ["prometheus", "--config.file=prometheus.yaml", "--storage.tsdb.path=data"]
    prometheus = Contender("prometheus", [*words, "--web.listen-address=127.0.0.1:{port}"], health="/-/ready")
    with started(prometheus, folder / "prometheus.log") as (process, port):
        yield Prometheus(f"http://127.0.0.1:{port}", process)


def aim(folder: Path, port: int | None) -> None:
    """Write Prometheus' configuration, which scrapes a server each second, or nothing."""
    config = re.sub(r"interval: \d+s", "interval: 1s", render(f"127.0.0.1:{port}", "runbooks")["prometheus.yaml"])
    key = f"    authorization: {{credentials: {KEYS['batch']}}}\n"
    config = config.replace("    static_configs:", key + "    static_configs:")
    (folder / "prometheus.yaml").write_text(config if port else config.replace('["127.0.0.1:None"]', "[]"))


@dataclass(slots=True)
class Run:
    begin_s: float
    end_s: float
    fired_s: dict[str, tuple[float, float]]
    """Alert -> the first and the last second in which it fired."""
    figures: dict[str, float]
    doctor: str


def ask(url: str, users: Users, seconds: float) -> list[Record]:
    sent = send(
        Workload(name="incident", jobs=users.jobs()),
        Target(url=url, model="model", api_key=KEYS.get(users.key)),
        pace=Pace(concurrency=users.count),
        options=SendOptions(max_s=seconds),
    )
    return sent.records


def latencies(users: Users, records: Sequence[Record]) -> dict[str, float]:
    ended = [one for one in records if one.end is End.OK]
    whose = f", {users.key}" if users.key else ""
    firsts = [(one.first_ns or one.ended_ns) - one.intended_ns for one in ended]
    wholes = [one.ended_ns - one.intended_ns for one in ended]
    return {
        f"answers{whose}": len(ended),
        f"first token{whose} (median, s)": round(median(firsts or [0]) / 1e9, 2),
        f"whole answer{whose} (median, s)": round(median(wholes or [0]) / 1e9, 2),
    }


class Scene:
    """A Prometheus that watches a server during an incident."""

    def __init__(self, incident: Incident, folder: Path, seconds: float, prometheus: Prometheus) -> None:
        self._incident, self._folder, self._seconds, self._prometheus = incident, folder, seconds, prometheus

    def run(self, settings: Sequence[str]) -> Run:
        with started(self._server(settings), self._folder / "server.log") as (_, port), self._scraped(port):
            url, begin_s = f"http://127.0.0.1:{port}", time.time()
            with ThreadPoolExecutor() as pool:
                loads = [pool.submit(ask, url, users, self._seconds) for users in self._incident.users]
                time.sleep(self._seconds * 0.65)
                doctor = self._doctor(port)
                figures = {}
                for users, load in zip(self._incident.users, loads, strict=True):
                    figures |= latencies(users, load.result())
            time.sleep(2)  # until all is scraped
            end_s = time.time()
            figures |= {name: round(self._prometheus.value(query), 3) for name, query in self._incident.counts.items()}
        found = self._prometheus.over('ALERTS{alertstate="firing"}', begin_s, end_s)
        fired_s = {labels["alertname"]: (round(points[0][0]), round(points[-1][0])) for labels, points in found}
        return Run(begin_s, end_s, fired_s, figures, doctor)

    @contextmanager
    def _scraped(self, port: int) -> Iterator[None]:
        self._prometheus.scrape(self._folder, port)
        try:
            yield
        finally:  # before the server stops, which would be an alert of its own
            self._prometheus.scrape(self._folder, None)
            time.sleep(2)

    def _server(self, settings: Sequence[str]) -> Contender:
        incident = self._incident
        start = (
            ["-c", SLOW_DISK.format(bytes_per_s=incident.disk_bytes_per_s)] if incident.disk_bytes_per_s else ["-m", "penstock"]
        )
        words = [sys.executable, *start, "serve", DEFAULT_MODEL, "--served-model-name", "model", "--port", "{port}"]
        if incident.doctor_key:
            keys = self._folder / "keys.toml"
            keys.write_text("".join(f'[[keys]]\nname = "{name}"\nkey = "{key}"\n' for name, key in KEYS.items()))
            keys.chmod(0o600)
            words += ["--api-keys-file", "keys.toml"]
        return Contender("penstock", [*words, *incident.settings, *settings], health="/ready")

    def _doctor(self, port: int) -> str:
        words = [sys.executable, "-m", "penstock", "doctor", "--port", str(port), "--seconds", f"{self._seconds / 5:.0f}"]
        if self._incident.doctor_key:
            words += ["--api-key", KEYS[self._incident.doctor_key]]
        return subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False).stdout


def pictured(prometheus: Prometheus, titles: Sequence[str], before: Run, after: Run) -> Sequence[Panel]:
    """The board's panels over both runs. A line marks the change."""
    panels = []
    for board in [entry for entry in BOARD if isinstance(entry, BoardPanel) and entry.title in titles]:
        series = []
        for query, legend in board.queries:
            query = query.replace("$model", ".*").replace("$__rate_interval", "15s")
            for labels, points in prometheus.over(query, before.begin_s, after.end_s, step_s=5):
                name = re.sub(r"\{\{(\w+)\}\}", lambda label, labels=labels: labels.get(label[1], ""), legend)
                finite = [(at_s, value) for at_s, value in points if math.isfinite(value)]
                if any(value for _, value in finite):
                    series.append(Series(name, finite, "line"))
        top = max((value for one in series for _, value in one.points), default=1.0)
        change_s = after.begin_s - before.begin_s
        series.append(Series("the change", [(change_s, 0.0), (change_s, top)], "dashed"))
        panels.append(Panel(board.title, Axis("s"), Axis(UNITS.get(board.unit, ""), low=0.0), series))
    return panels


def slim(svg: str) -> str:
    """Leave out what does not show: names of elements, indents, rotations by nothing, hundredths of a point."""
    for found, kept in (
        (r' id="(?:\w+axis|[a-z]+tick|text|line2d|patch|axes)_\d+"', ""),
        (r' transform="rotate\(-0 [^"]*"', ""),
        (r"(?m)^ +", ""),
        (r"(\d\.\d)\d+(?![\d<])", r"\1"),
        (r" font-family: 'DejaVu Sans';", ""),
        (r"<style type=\"text/css\">", r"\g<0>text{font-family: 'DejaVu Sans', sans-serif} "),
        (r" \n", " "),
    ):
        svg = re.sub(found, kept, svg)
    return svg


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("incident", choices=INCIDENTS)
    parser.add_argument("--seconds", type=float, default=60, help="of each of the two runs (default: %(default)s)")
    parser.add_argument("--instead", metavar="FLAGS", help="settings to try in place of the right ones")
    parser.add_argument("--picture", type=Path, metavar="FILE.svg")
    args = parser.parse_args()
    incident = INCIDENTS[args.incident]
    right = args.instead.split() if args.instead else incident.right
    with tempfile.TemporaryDirectory() as name, scraping(Path(name)) as prometheus:
        scene = Scene(incident, Path(name), args.seconds, prometheus)
        before, after = scene.run(incident.wrong), scene.run(right)
        panels = pictured(prometheus, incident.panels, before, after)
    if args.picture:
        drawn = draw(f"{args.incident}: panels of the board, drawn from its queries", panels).svg().decode()
        args.picture.write_text(slim(drawn), encoding="utf-8")
    for words, run in ((incident.wrong, before), (right, after)):
        print(f"{' '.join(words) or 'the defaults'}: alerts {run.fired_s or 'none'}\n{run.doctor}")
    rows = [(name, before.figures[name], after.figures[name]) for name in before.figures]
    print(origin(f"{args.seconds:g} s each"))
    print(table(["", f"`{' '.join(incident.wrong) or 'defaults'}`", f"`{' '.join(right)}`"], rows))
    print(json.dumps({"benchmark": "incidents", "incident": args.incident, "before": asdict(before), "after": asdict(after)}))


if __name__ == "__main__":
    main()
