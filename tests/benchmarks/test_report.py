"""The page of a GPU's figures: every section has its place, and only what has a result changes."""

import json

import pytest
import report


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


@pytest.mark.parametrize("text", ["Traceback\n", "", "[1]\n"])
def test_a_run_that_failed_is_named(tmp_path, text):
    broken = tmp_path / "step-1.txt"
    broken.write_text(text)
    with pytest.raises(SystemExit, match=r"step-1\.txt: the last line is not a JSON object"):
        report.read_results([broken])


def test_a_result_of_another_benchmark_is_refused(tmp_path):
    path = tmp_path / "scheduler-2.txt"
    path.write_text(json.dumps({"benchmark": "scheduler"}) + "\n")
    with pytest.raises(SystemExit, match="no section for the benchmark 'scheduler'"):
        report.read_results([path])
