"""Imports all of Penstock, so that Python writes the bytecode of the modules that a server uses, and of no others.

Run while the image is built. Without bytecode a server in a container starts a second later, each time; bytecode of all
installed modules would make the image 20 MB larger.
"""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
import urllib.request  # noqa: F401  # for healthcheck.py

import penstock

for module in pkgutil.walk_packages(penstock.__path__, "penstock.", onerror=lambda _: None):
    if not module.name.endswith("__main__"):
        with contextlib.suppress(ImportError):  # a GPU's modules need torch
            importlib.import_module(module.name)
