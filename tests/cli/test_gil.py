"""A free-threaded Python with its GIL on: `penstock env` and the log of `serve` say so."""

import logging
import sys
import types

import pytest

from penstock import machine
from penstock.cli import env, serve


@pytest.fixture
def free_threaded(monkeypatch):
    """A free-threaded Python without its GIL. Returns a function that turns the GIL on."""
    monkeypatch.setattr(machine.sysconfig, "get_config_var", lambda _: 1)
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    return lambda: monkeypatch.setattr(sys, "_is_gil_enabled", lambda: True, raising=False)


def test_env_says_nothing_of_a_python_that_always_has_its_gil(monkeypatch):
    monkeypatch.setattr(machine.sysconfig, "get_config_var", lambda _: 0)
    assert env._gil() == ""


def test_env_names_the_package_that_turns_the_gil_on(free_threaded, monkeypatch):
    def find(name):
        if name == "old":
            free_threaded()
        return types.ModuleType(name)

    assert env._gil() == ", free-threaded, without the GIL"
    monkeypatch.setattr(env.importlib, "import_module", find)
    assert env._gil(("new", "old", "newer")) == ", free-threaded, but old turns the GIL on"
    assert "PYTHON_GIL" in env._gil()


def test_serve_warns_of_the_gil(free_threaded, caplog):
    with caplog.at_level(logging.WARNING):
        serve.warn_of_gil()
        assert not caplog.records
        free_threaded()
        serve.warn_of_gil()
    assert "penstock env" in caplog.text


def test_everything_that_a_server_imports_leaves_the_gil_off():
    if not machine.is_free_threaded():
        pytest.skip("this Python always has its GIL")
    assert env._gil() == ", free-threaded, without the GIL"
