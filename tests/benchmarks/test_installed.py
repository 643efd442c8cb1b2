"""Everything that is installed with Penstock is counted, and it stays small."""

from pathlib import Path

import installed

MAX_MB = 125


def test_requirements_are_followed_to_their_end():
    found = installed.required(["starlette>=0.1", 'nothing-such ; python_version < "3"', 'nor-this ; extra == "x"'])
    assert {"starlette", "anyio"} <= found.keys()
    assert not found.keys() & {"nothing-such", "nor-this"}


def test_the_installation_is_small():
    sizes = installed.installed_mb()
    assert sizes["numpy"] > 20
    assert sum(sizes.values()) <= MAX_MB, sizes


def test_the_compiled_module_is_counted_and_byte_code_can_be_left_out():
    files = installed.distribution_files()
    assert any(path.name.startswith("_native") and path.suffix != ".py" for path in files["penstock"])
    assert installed.without_byte_code([Path("a/b.py"), Path("a/__pycache__/b.pyc")]) == (Path("a/b.py"),)


def test_byte_code_is_counted_though_it_is_not_there(monkeypatch, tmp_path):
    source, other = tmp_path / "a.py", tmp_path / "a.so"
    source.write_text("x = 1\n")
    other.write_bytes(bytes(5_000_000))
    monkeypatch.setattr(installed, "distribution_files", lambda: {"one": (source, other)})
    assert installed.installed_mb() == {"one": 5.0}
    assert 50 < installed.byte_code_mb() * 1e6 < 500
