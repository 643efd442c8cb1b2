"""Settings of the tests of `deploy`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.chat_templates import one_process_for_each_template


@pytest.fixture(scope="module", autouse=True)
def shared_templates() -> Iterator[None]:
    with one_process_for_each_template():
        yield
