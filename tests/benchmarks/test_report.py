"""The page of results: every section has its place, and what a benchmark prints becomes a table and a plot."""

import json
import os
import sys
from xml.etree import ElementTree

import pytest
import report
import report_sections

PEAK = {"best": 2000.0, "median": 1900.0}
KERNEL = {"us": 10.0, "gops": 500.0, "gbs": 30.0, "share": 0.6, "median_share": 0.55}
WHERE = {"date": "2026-01-02", "cpu": "A CPU", "threads": 2}
CONTENDER = {
    "ready_s": 0.7,
    "resident_mb": 200.0,
    "installed_mb": 120.0,
    "by_concurrency": {"32": {"output_tokens_per_s": 2000.0, "rounds": [1900.0, 2000.0, 2050.0]}},
}
RESULTS = {
    "peaks": WHERE | {"peaks": {"avx512": dict.fromkeys(("int8", "bf16", "float32", "read"), PEAK)}},
    "step": WHERE
    | {
        "model": "small",
        "variant": "avx512",
        "kv_cache_dtype": "int8",
        "peaks": {"int8": PEAK, "read": PEAK},
        "steps": [
            {"batch": 32, "query_len": 1, "context_len": 256, "ms": 4.0, "min_ms": 3.5}
            | {"rows": 0.5, "linear": 3.0, "attention": 0.4, "sampling": 0.1}
            | {"share": 0.46, "best_share": 0.5, "compute_share": 0.46, "read_share": 0.3}
        ],
    },
    "kernels": WHERE
    | {
        "variants": {
            "avx512": {
                "products": [
                    {"model": "small", "shape": "down", "kind": "q4_1", "rows": {"1": KERNEL, "32": KERNEL}}
                    | {"worst_neighbours": {"ratio": 0.9, "rows": [12, 13]}}
                ],
                "attention": [{"model": "small", "cases": [{"rows": 1, "query_len": 1, "context_len": 128} | KERNEL]}],
            }
        }
    },
    "peers": {
        "date": "2026-01-02",
        "cpus": 2,
        "model": "small.gguf",
        "workload": {"name": "sharegpt"},
        "loads": {"32": 96},
        "repeat": 3,
        "contenders": {"penstock": CONTENDER, "other": CONTENDER},
        "times_peer": {"other": {"32": 1.0}},
        "common_start_chars": {"penstock": 200.0, "other": 12.5},
        "left_out": {"third": "no compiler"},
    },
    "inprocess": {
        "date": "2026-01-02",
        "model": "small",
        "workload": "sharegpt",
        "repeat": 3,
        "median_by_concurrency": {"32": {"ratio": 0.93}},
    }
    | {"ratio_range": {"32": [0.9, 0.95]}},
    "streaming": WHERE | {"step_ms": 10.0, "by_streams": {"1": {"http_us_per_token": 54}, "256": {"http_us_per_token": 18.4}}},
    "startup": WHERE | {"ready_s": {"median": 0.65, "max": 0.7}},
    "scheduler": WHERE | {"decode": {"total_us": 112.3}},
    "pipeline": WHERE | {"step_ms": 5.0, "rows_64_depth_2": {"gap_us": 0.1}},
}
SEEN = {
    "peaks": "2000 (1900)",
    "step": "**46 %** (50 %)",
    "kernels": "| down q4_1 | 60 | 60 | 10.0 (1) | 500 (32) | 0.90 (12 to 13) |",
    "peers": "| penstock | 2000 (1900 to 2050) | 0.7 | 200.0 | 120.0 |",
    "inprocess": "| ratio | 0.93 |\n| ratio_range | 0.9 to 0.95 |",
    "streaming": "| streams | 1 | 256 |\n| --- | --- | --- |\n| http_us_per_token | 54 | 18.4 |",
    "startup": "| ready_s median | 0.65 |",
    "scheduler": "| decode total_us | 112.3 |",
    "pipeline": "| rows_64_depth_2 gap_us | 0.1 |",
}


def test_the_page_has_a_place_for_every_section():
    page = report.PAGE.read_text(encoding="utf-8")
    for name in report.SECTIONS:
        report.replace_section(page, name, "")


def test_only_the_section_of_a_result_changes():
    page = "<!-- begin a -->\nold\n<!-- end a -->\nkept\n<!-- begin b -->\nold\n<!-- end b -->\n"
    assert report.replace_section(page, "b", "new") == page.replace("old\n<!-- end b", "new\n<!-- end b")
    with pytest.raises(SystemExit):
        report.replace_section(page, "c", "new")


def test_only_what_has_the_title_of_a_result_changes():
    page = "<!-- begin a -->\n### one\n\nold\n\n### two\n\nold\n<!-- end a -->\n"
    changed = report.replace_section(page, "a", "### two\n\nnew\n\n### three\n\nnew")
    assert changed == "<!-- begin a -->\n### one\n\nold\n\n### two\n\nnew\n\n### three\n\nnew\n<!-- end a -->\n"
    assert report.replace_section("<!-- begin a -->\nNone yet.\n<!-- end a -->\n", "a", "### one") == (
        "<!-- begin a -->\n### one\n<!-- end a -->\n"
    )


@pytest.mark.parametrize("name", report_sections.SECTIONS)
def test_results_become_tables_and_plots(name, tmp_path, monkeypatch):
    if name in ("kernels", "peers"):
        pytest.importorskip("matplotlib", reason="plots are an extra: pip install 'penstock[lab]'")
    page = tmp_path / "performance.md"
    page.write_text(f"# Page\n<!-- begin {name} -->\nold\n<!-- end {name} -->\n")
    result = tmp_path / "a.txt"
    result.write_text("some lines\n" + json.dumps(RESULTS[name] | {"benchmark": name}) + "\n")
    monkeypatch.setattr(sys, "argv", ["report.py", str(result), "--page", str(page)])
    report.main()
    text = page.read_text()
    assert SEEN[name] in text
    assert "old" not in text
    for plot in (tmp_path / "performance").iterdir():
        ElementTree.parse(plot)
        assert f"(performance/{plot.name})" in text
    assert any((tmp_path / "performance").iterdir()) == (name in ("kernels", "peers"))


def test_peers_with_a_title_have_a_table_and_a_plot_of_their_own():
    pytest.importorskip("matplotlib", reason="plots are an extra: pip install 'penstock[lab]'")
    whole = RESULTS["peers"]
    settings = whole | {"title": "other settings of the peers"}
    text, plots = report_sections.peers([whole, settings])
    assert "### small.gguf, sharegpt\n" in text
    assert "### small.gguf, sharegpt, other settings of the peers\n" in text
    assert len(plots) == 2


def test_the_number_of_rounds_is_told_of_each_contender_where_it_differs():
    pytest.importorskip("matplotlib", reason="plots are an extra: pip install 'penstock[lab]'")
    contenders = {name: CONTENDER | {"num_rounds": n} for name, n in (("penstock", 3), ("other", 2))}
    text, _ = report_sections.peers([RESULTS["peers"] | {"contenders": contenders}])
    assert "| penstock (n=3) | 2000" in text
    assert "| other | 1.00 | 12.5 |" in text
    assert "| other (n=2) | 2000" in text
    assert "medians of n rounds" in text


def test_a_step_says_how_wide_its_keys_and_values_are():
    text, _ = report_sections.step([RESULTS["step"]])
    assert "2026-01-02, A CPU, 2 threads, keys and values in int8. Peaks" in text


def test_a_run_that_failed_is_named(tmp_path):
    broken = tmp_path / "step-1.txt"
    broken.write_text("Traceback\n")
    with pytest.raises(SystemExit, match=r"step-1\.txt"):
        report.read_results([broken])


def test_a_result_without_a_name_or_date_has_those_of_its_file(tmp_path):
    path = tmp_path / "scheduler-2.txt"
    path.write_text('{"running": 256}\n')
    os.utime(path, (1_767_323_045, 1_767_323_045))
    assert report.read_results([path]) == {"scheduler": [{"running": 256, "date": "2026-01-02"}]}
