"""`penstock show`."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

from tiny_models import TinyLlama, write_gguf

Penstock = Callable[..., subprocess.CompletedProcess[str]]


def test_a_model_is_shown_with_its_speed_as_an_upper_bound(penstock: Penstock, tiny_model: Path) -> None:
    result = penstock("show", tiny_model)
    assert (result.returncode, result.stderr) == (0, "")
    rows = dict(line.split(maxsplit=1) for line in result.stdout.splitlines())
    assert rows["architecture"] == "llama, 2 layers"
    assert rows["context"] == "512 tokens"
    assert rows["refused"] == "nothing"
    assert "upper bounds by the peaks measured just now" in rows["speed"]
    assert rows["Q8_0"].endswith("8.5 bits each")
    assert "longest request 512 tokens" in rows["memory"]


def test_a_program_reads_numbers(penstock: Penstock, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "bad.gguf", TinyLlama(), extra={"tokenizer.ggml.pre": "klingon", "general.sampling.top_k": 5})
    result = penstock("show", path, "--json", "--no-speed")
    assert (result.returncode, result.stderr) == (0, "")
    shown = json.loads(result.stdout)
    assert [one["check"] for one in shown["refused"]] == ["tokenizer"]
    assert "klingon" in shown["refused"][0]["cause"]
    assert shown["upper_bounds"] is None
    assert shown["sampling"] == {"top_k": 5}
    assert shown["num_parameters"] == sum(values.size for values in TinyLlama().weights().values())
    assert shown["memory"]["longest_request_tokens"] == 256


def test_one_that_is_not_here_is_told_with_its_size(penstock: Penstock) -> None:
    result = penstock("show", "qwen2.5-coder")
    assert result.returncode == 1
    assert "It takes 1.04 GiB. Fetch it with `penstock pull qwen2.5-coder`." in result.stderr
