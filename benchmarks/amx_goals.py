"""The goals of Penstock on a machine with AMX, and the lines of a table that judge it. `amx.py` measures it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PROMPT, ROW = "1x512@0", "1x1@128"
"""A prompt and a row of `step.py`."""
Results = Mapping[str, Any]
"""The figures of each run that did not fail, by its name."""


@dataclass(frozen=True, slots=True)
class Goal:
    what: str
    least: float
    """A share if it is at most 1, else a ratio."""
    run: str
    path: tuple[str, ...]
    """The keys that lead to the figure among the run's."""

    def row(self, results: Results) -> tuple[str, str, str, str]:
        """A line of the table. A figure that is missing does not meet the goal."""
        found = results.get(self.run)
        for key in self.path:
            found = found.get(key) if found is not None else None
        if found is None:
            return self.what, self._words(self.least), "not measured", "**no**"
        return self.what, self._words(self.least), self._words(found), "yes" if found >= self.least else "**no**"

    def _words(self, value: float) -> str:
        return f"{100 * value:.4g} %" if self.least <= 1 else f"{value:.4g} times"


GOALS = (
    Goal("tests that tiles have the bits of their emulation", 1.0, "tiles", ("passed",)),
    Goal("SmolLM2, prompt of 512: share of the tiles' peak", 0.4, "step-smollm2-amx", ("steps", PROMPT, "compute_share")),
    Goal("SmolLM2, one row: share of the speed of memory", 0.9, "step-smollm2-amx", ("steps", ROW, "read_share")),
    Goal("Qwen2.5-Coder, prompt of 512: share of the tiles' peak", 0.4, "step-qwen-amx", ("steps", PROMPT, "compute_share")),
    Goal("Qwen2.5-Coder, one row: share of the speed of memory", 0.9, "step-qwen-amx", ("steps", ROW, "read_share")),
    Goal("SmolLM2, ShareGPT, 32 clients, over OpenVINO", 2.2, "peers-smollm2-sharegpt", ("ratios", "openvino", "32")),
    Goal("SmolLM2, ShareGPT, 8 clients, over OpenVINO", 1.8, "peers-smollm2-sharegpt", ("ratios", "openvino", "8")),
    Goal("SmolLM2, ShareGPT, 1 client, over OpenVINO", 1.4, "peers-smollm2-sharegpt", ("ratios", "openvino", "1")),
    Goal("SmolLM2, long prompts, 8 clients, over OpenVINO", 1.5, "peers-smollm2-long", ("ratios", "openvino", "8")),
    Goal("SmolLM2, long prompts, 8 clients, over vLLM", 1.5, "peers-smollm2-long", ("ratios", "vllm", "8")),
    Goal("Qwen2.5-Coder, ShareGPT, 16 clients, over OpenVINO", 1.6, "peers-qwen-sharegpt", ("ratios", "openvino", "16")),
    Goal("Qwen2.5-Coder, ShareGPT, 1 client, over OpenVINO", 1.1, "peers-qwen-sharegpt", ("ratios", "openvino", "1")),
    Goal("Qwen2.5-Coder, long prompts, 8 clients, over OpenVINO", 1.5, "peers-qwen-long", ("ratios", "openvino", "8")),
)
