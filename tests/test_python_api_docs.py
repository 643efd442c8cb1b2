"""The examples of docs/python-api.md run as they stand, with a tiny model in the place of the one that they name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tiny_models import TinyLlama, write_gguf

PAGE = (Path(__file__).parent.parent / "docs" / "python-api.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^## (.+?)\n\n```python\n(.+?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("models") / "tiny.gguf", TinyLlama(max_model_len=512))


def test_every_example_is_found() -> None:
    assert len(EXAMPLES) == PAGE.count("```python")


@pytest.mark.parametrize(("title", "code"), EXAMPLES, ids=[title for title, _ in EXAMPLES])
def test_an_example_runs(title: str, code: str, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert '"smollm2:135m"' in code, title
    exec(compile(code.replace('"smollm2:135m"', repr(str(path))), title, "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.strip()
