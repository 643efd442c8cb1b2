"""The command line of the benchmark of a server, and what it makes of several runs."""

import sys

import pytest
import serve


def arguments(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["serve.py", *words])
    return serve.read_arguments()


def test_defaults_are_those_of_the_published_comparison(monkeypatch):
    args = arguments(monkeypatch)
    assert (args.workload, args.max_prompt_tokens, args.max_reply_tokens) == ("sharegpt", 512, 200)
    assert dict(zip(args.concurrency, args.requests, strict=True)) == {32: 96, 8: 32, 1: 8}


def test_each_concurrency_needs_a_number_of_requests(monkeypatch):
    with pytest.raises(SystemExit):
        arguments(monkeypatch, "--concurrency", "4")


def test_report_is_the_median_of_each_figure_and_the_range_of_the_throughput():
    runs = [{"output_tokens_per_s": rate, "seconds": 10.0 - rate} for rate in (1.0, 5.0, 2.0)]
    assert serve.median_figures(runs) == {
        "output_tokens_per_s": 2.0,
        "seconds": 8.0,
        "output_tokens_per_s_min": 1.0,
        "output_tokens_per_s_max": 5.0,
    }
