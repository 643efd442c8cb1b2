"""Every test of this folder runs once for each executor in `factories.FACTORIES`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from contracts.factories import FACTORIES, Factory
from contracts.harness import Harness


@pytest.fixture(params=FACTORIES, ids=lambda factory: factory.name)
def harness(request: pytest.FixtureRequest) -> Iterator[Harness]:
    factory: Factory = request.param
    harness = Harness(factory)
    yield harness
    harness.close()
