"""Writes the benchmarks' results into docs/performance.md, and draws its plots.

Takes files whose last line is the JSON object that a benchmark printed; several of one benchmark (other models, other
instruction sets) become one section, in the order given. A section without a result stays as it is.

    python benchmarks/report.py build/results/*.txt

`benchmarks/all.sh` runs every benchmark and ends with this.
"""

from __future__ import annotations

import argparse
import datetime
import json
from pathlib import Path
from typing import Any

from report_sections import SECTIONS

PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
FOLDER = "performance"
"""Of the plots, beside the page."""


def read_results(paths: list[Path]) -> dict[str, list[dict[str, Any]]]:
    """The results by benchmark. Raises SystemExit for a file without one."""
    found: dict[str, list[dict[str, Any]]] = {}
    for path in paths:
        lines = path.read_text(encoding="utf-8").strip().splitlines()
        try:
            result = json.loads(lines[-1])
            name = result.get("benchmark", path.stem.partition("-")[0])
        except (IndexError, ValueError, AttributeError):
            raise SystemExit(f"{path}: the last line is no JSON object; that benchmark has failed.") from None
        if name not in SECTIONS:
            raise SystemExit(f"{path}: no section for the benchmark {name!r}; there are {', '.join(SECTIONS)}.")
        written = datetime.datetime.fromtimestamp(path.stat().st_mtime, datetime.UTC)
        found.setdefault(name, []).append({"date": written.date().isoformat()} | result)
    return found


def replace_section(page: str, name: str, text: str) -> str:
    """The page with what stands between the section's two marks replaced."""
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    head, found_begin, rest = page.partition(begin)
    _, found_end, tail = rest.partition(end)
    if not found_begin or not found_end:
        raise SystemExit(f"the page has no section between '{begin}' and '{end}'")
    return f"{head}{begin}\n{text}\n{end}{tail}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--page", type=Path, default=PAGE)
    args = parser.parse_args()
    page = args.page.read_text(encoding="utf-8")
    plots: dict[str, str] = {}
    for name, results in read_results(args.results).items():
        text, drawn = SECTIONS[name](results)
        page = replace_section(page, name, text)
        plots |= drawn
        print(f"{name}: {len(results)} results, {len(drawn)} plots")
    folder = args.page.parent / FOLDER
    folder.mkdir(exist_ok=True)
    for file_name, drawing in plots.items():
        (folder / file_name).write_text(drawing, encoding="utf-8")
    args.page.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
