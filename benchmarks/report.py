"""Writes the GPU benchmarks' results into docs/notes/gpu-figures.md, and draws its plots.

Takes files whose last line is the JSON object that a benchmark printed; several of one benchmark (other models, other formats)
become one section. The content of a section under a `###` title stays as it is until a result with that title comes; a section
without such titles is replaced as a whole, and one without a result stays.

    python benchmarks/report.py build/gpu/*.txt

`benchmarks/gpu_all.sh` runs the benchmarks and ends with this. Results can be taken to another machine and reported there, with
Penstock and its extra `lab` for the plots. A result that is no measurement of a GPU is refused.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from report_gpu import SECTIONS, why_no_figures

PAGE = Path(__file__).parents[1] / "docs" / "notes" / "gpu-figures.md"
FOLDER = "figures"
"""Folder of the plots, beside the page."""


def read_results(paths: list[Path]) -> dict[str, list[dict[str, Any]]]:
    """The results by benchmark. Raises SystemExit for a file without one, and for one that may not go into the page."""
    found: dict[str, list[dict[str, Any]]] = {}
    for path in paths:
        lines = path.read_text(encoding="utf-8").strip().splitlines()
        try:
            result = json.loads(lines[-1])
            name = result.get("benchmark")
        except (IndexError, ValueError, AttributeError):
            raise SystemExit(f"{path}: the last line is not a JSON object: that benchmark failed.") from None
        if name not in SECTIONS:
            raise SystemExit(f"{path}: no section for the benchmark {name!r}; there are {', '.join(SECTIONS)}.")
        if (cause := why_no_figures(result)) is not None:
            raise SystemExit(f"{path}: no figures of a GPU: {cause}.")
        found.setdefault(name, []).append(result)
    return found


def replace_section(page: str, name: str, text: str) -> str:
    """The page with what stands between the section's two marks brought up to date: see `merge`."""
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    head, found_begin, rest = page.partition(begin)
    old, found_end, tail = rest.partition(end)
    if not found_begin or not found_end:
        raise SystemExit(f"the page has no section between '{begin}' and '{end}'")
    return f"{head}{begin}\n{merge(old, text)}\n{end}{tail}"


def merge(old: str, new: str) -> str:
    """The new parts in the places of the old ones with the same title, and after them those that are new.

    Without titles in both there is nothing to keep.
    """
    parts, replacing = by_title(old), by_title(new)
    return "\n\n".join((parts | replacing).values()) if parts and replacing else new


def by_title(section: str) -> dict[str, str]:
    """The parts that begin with a `###` title, by that line; what stands before the first belongs to none."""
    parts = re.split(r"^(?=### )", section, flags=re.MULTILINE)[1:]
    return {part.partition("\n")[0]: part.strip() for part in parts}


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--page", type=Path, default=PAGE)
    args = parser.parse_args(words)
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
