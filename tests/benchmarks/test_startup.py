"""What is installed with Penstock: all of it is counted, and it stays small."""

from pathlib import Path

import installed
import startup

MAX_INSTALLED_MB = 150


def test_requirements_are_followed_to_their_end():
    found = installed.required(["fastapi>=0.1", 'nothing-such ; python_version < "3"', 'nor-this ; extra == "x"'])
    assert {"fastapi", "starlette", "pydantic", "pydantic-core", "anyio"} <= found.keys()
    assert not found.keys() & {"nothing-such", "nor-this"}


def test_the_installation_is_small():
    sizes = startup.installed_mb()
    assert sizes["numpy"] > 20
    assert sum(sizes.values()) <= MAX_INSTALLED_MB, sizes


def test_the_compiled_module_is_counted_and_byte_code_can_be_left_out():
    files = installed.distribution_files()
    assert any(path.name.startswith("_native") and path.suffix != ".py" for path in files["penstock"])
    assert installed.without_byte_code([Path("a/b.py"), Path("a/__pycache__/b.pyc")]) == (Path("a/b.py"),)
