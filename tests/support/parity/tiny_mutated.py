"""Helpers that `parity/test_tiny_mutated.py` shares with other tests."""

from __future__ import annotations

import os

MAX_RELATIVE_RMS = 0.15
"""Settings that no author would choose make models that magnify rounding more than real ones."""

MAX_EXAMPLES = 500 if os.environ.get("HYPOTHESIS_PROFILE") == "thorough" else 3
