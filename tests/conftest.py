"""Settings for the whole suite: Ctrl-C works, and hypothesis runs the same examples every time, unless asked for more.

HYPOTHESIS_PROFILE=seeded pytest tests/properties --hypothesis-seed=N   the examples of a seed, as `make test-properties`
HYPOTHESIS_PROFILE=thorough pytest tests/properties                     random examples, ten times as many
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

# Before anything imports NumPy: BLAS threads that spin on two cores make the reference backend many times slower.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import pytest
from hypothesis import HealthCheck, Phase, settings

pytest.register_assert_rewrite("support")  # so that its assertions say as much as those of tests

settings.register_profile("default", derandomize=True, deadline=None, database=None, max_examples=50)
# Nothing is shrunk: that can take minutes, and the seed is enough to repeat a failure.
settings.register_profile("seeded", deadline=None, database=None, max_examples=150, phases=[Phase.explicit, Phase.generate])
settings.register_profile(
    "thorough", deadline=None, max_examples=500, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """Ctrl-C works in tests and in commands that they start, also where pytest was started with SIGINT ignored, as by `&` in a
    script: a child inherits that, and would go on for ever."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True, scope="session")
def verdicts_on_kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests leave the user's verdicts on kernels alone."""
    from penstock.backends.native import choice

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choice, "default_cache_dir", lambda: tmp_path_factory.mktemp("verdicts"))
        yield


@pytest.fixture(autouse=True, scope="session")
def quick_clients(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """HTTP clients, also of processes that tests start, read one certificate: the usual bundle takes each 25 ms of CPU time.

    No test connects to a server whose certificate is signed by an authority of the bundle.
    """
    try:
        import certifi
    except ImportError:  # then there are no HTTP clients either
        yield
        return
    bundle, end = Path(certifi.where()).read_text(encoding="utf-8"), "-----END CERTIFICATE-----\n"
    one = tmp_path_factory.mktemp("certificates") / "one.pem"
    one.write_text(bundle[: bundle.index(end) + len(end)], encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(one))
        yield
