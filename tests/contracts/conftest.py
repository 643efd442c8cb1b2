"""Every test of this folder runs once for each executor in `factories.FACTORIES`, unless it names those that do."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.contracts.factories import FACTORIES, Factory
from support.contracts.harness import Harness


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "harness" in metafunc.fixturenames:
        factories = [each for each in FACTORIES if not each.tests or metafunc.function.__name__ in each.tests]
        if metafunc.module.__name__.endswith("test_adapter_contract"):
            factories = [each for each in FACTORIES if each.make_adapted is not None]
        metafunc.parametrize("harness", factories, indirect=True, ids=lambda factory: factory.name)


@pytest.fixture
def harness(request: pytest.FixtureRequest) -> Iterator[Harness]:
    factory: Factory = request.param
    harness = Harness(factory)
    yield harness
    harness.close()
