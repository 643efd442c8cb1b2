"""Runs the Python examples of the docs that talk to a server, with a made-up model in place of theirs."""

import json
import re
from pathlib import Path

import pytest

from support.server.harness import make_text_runtime
from support.server.jobs import CHAT, impatient, line, serving

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("tutorial/first-server", "http-api", "tools", "batch", "encoders")


@pytest.mark.parametrize("page", PAGES)
def test_an_example_runs(page, tmp_path, monkeypatch, capsys):
    impatient(monkeypatch)
    monkeypatch.chdir(tmp_path)
    Path("requests.jsonl").write_text("\n".join(json.dumps(line(str(nth), CHAT)) for nth in range(2)))
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    code = re.search(r"^```python\n(.*?openai.*?)^```", text, re.MULTILINE | re.DOTALL)[1]
    with serving(tmp_path / "jobs", runtime=make_text_runtime() if page == "encoders" else None) as server:
        code = re.sub(r"http://(127\.0\.0\.1|localhost):8000", server.url, code)
        code = re.sub(r'model="[^"]+"', 'model="toy"', code).replace("time.sleep(10)", "time.sleep(0.01)")
        made = {}
        exec(compile(code, page, "exec"), made)
        made["client"].close()
    assert "vectors" in made or capsys.readouterr().out.strip()
    assert "batch" not in made or made["batch"].status == "completed"
