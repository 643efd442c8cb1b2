"""One real server for all tests of the folder that leave it as it was."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.models.cache import default_cache_dir
from penstock.models.catalog import resolve
from support.e2e.process import COMPLETIONS, GOOD, MODEL, Answer, RealServer, serving, stream


@pytest.fixture(scope="session")
def weights() -> None:
    """Skips where the default model was not fetched."""
    source = resolve(MODEL, default_cache_dir())
    if not source.is_present:
        pytest.skip(f"{source.path} is not there: run `penstock pull {MODEL}`")


@pytest.fixture(scope="session")
def server(weights: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """Ends in order, having logged nothing that somebody should look into."""
    with serving(tmp_path_factory.mktemp("server")) as running:
        yield running
        code, _ = running.end()
        log = running.log.read_text()
    assert code == 0
    assert "Traceback" not in log
    assert "ERROR" not in log


@pytest.fixture(scope="session")
def good(server: RealServer) -> Answer:
    """The answer to the good request when it runs alone."""
    answer = stream(server.url, COMPLETIONS, GOOD)
    assert answer.is_done
    assert len(answer.token_ids) == GOOD["max_tokens"]
    return answer
