"""Fixtures of the server's tests; the runtime and the live server are in `support/server/harness.py`."""

import pytest

from penstock.serve.http import acceptor
from support.server import harness


@pytest.fixture(scope="module", autouse=True)
def quick_ends():
    """Let a server look often whether its last connections are closed: most tests end one or more servers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(acceptor, "_POLL_S", 0.002)
        yield


@pytest.fixture
def runtime():
    runtime = harness.make_runtime()
    yield runtime
    runtime.close()


@pytest.fixture
async def client(runtime):
    async with harness.make_client(runtime) as client:
        yield client


@pytest.fixture(scope="module")
def live():
    """One live server for a module's tests."""
    with harness.running() as server:
        yield server


@pytest.fixture
def gate():
    """An executor that runs a step only when the test allows it."""
    return harness.GatedExecutor()


@pytest.fixture
def gated(gate):
    """A live server over `gate`."""
    with harness.running(gate) as server:
        yield server
        gate.open()
