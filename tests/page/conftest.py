"""One browser for a worker's tests. Without one they are skipped."""

from __future__ import annotations

import pytest

from e2e.conftest import weights
from support.page.browser import browsing, missing
from support.page.servers import speaking

__all__ = ["weights"]


@pytest.fixture(scope="session")
def chromium(tmp_path_factory):
    if programs := missing():
        pytest.skip(f"{' and '.join(programs)} not there (Debian: apt install chromium chromium-driver)")
    with browsing(tmp_path_factory.mktemp("browser") / "driver.log") as browser:
        yield browser


@pytest.fixture
def browser(chromium):
    """A window of a usual size, whose console has said nothing by the end of the test."""
    chromium.size(1280, 800)
    chromium.prefer("light")
    yield chromium
    complaints = chromium.complaints()
    chromium.open("about:blank")  # so that no test's page asks a server that is gone
    chromium.complaints()
    assert complaints == []


@pytest.fixture
def page(browser):
    """The page of a server that says hello: `page.server`."""
    with speaking("Hello, reader.") as server:
        browser.open(server.url)
        browser.server = server
        yield browser
