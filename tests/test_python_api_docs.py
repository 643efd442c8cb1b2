"""Runs the examples of docs/python-api.md and README.md as they stand, with tiny models in place of theirs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import penstock
from support.parity.encoder_cases import ENCODERS, write_encoder
from support.tiny_models import TinyLlama, write_gguf

ROOT = Path(__file__).parent.parent
PAGE, README = [(ROOT / name).read_text(encoding="utf-8") for name in ("docs/python-api.md", "README.md")]
EXAMPLES = re.findall(r"^## (.+?)\n\n```python\n(.+?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
OF_README = re.findall(r"^```python\n(.+?)^```", README, flags=re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By the name in the page."""
    encoder = write_encoder(ENCODERS["bert_gguf"], tmp_path_factory.mktemp("encoder"))
    model = write_gguf(tmp_path_factory.mktemp("models") / "tiny.gguf", TinyLlama(max_model_len=512))
    return {"smollm2:135m": model, "minilm": encoder}


def test_every_example_is_found() -> None:
    assert len(EXAMPLES) == PAGE.count("```python")
    assert len(OF_README) == README.count("```python") == 1


def test_the_reference_has_every_name() -> None:
    text = (ROOT / "docs/reference/python.md").read_text(encoding="utf-8")
    named = {*re.findall(r"\w+", text.rpartition("members: ")[2]), "LLM", "AsyncLLM", "__version__"}
    assert named == set(penstock.__all__)


@pytest.mark.parametrize(
    ("title", "code"),
    [*EXAMPLES, ("README", *OF_README)],
    ids=[*(title for title, _ in EXAMPLES), "README"],
)
def test_an_example_runs(title: str, code: str, paths: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    (name,) = [name for name in paths if f'"{name}"' in code]
    code = code.replace(f'"{name}"', repr(str(paths[name])))
    exec(compile(code, title, "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.strip()
