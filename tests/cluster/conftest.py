"""Settings of the cluster's tests: nobody waits long before looking again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.cluster import models
from penstock.serve.http import acceptor
from support.chat_templates import one_process_for_each_template


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch, one_process_for_each_template():
        patch.setattr(acceptor, "_POLL_S", 0.002)  # of a server that ends
        patch.setattr(models, "LOOK_S", 0.005)  # for replicas that have come
        yield
