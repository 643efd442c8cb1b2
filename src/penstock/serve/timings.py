"""llama.cpp's `timings`."""

from __future__ import annotations

from typing import Any

from penstock.calls.in_flight import RunningCall
from penstock.engine.ports import OutputChunk


class Timings:
    """The times of one call's choices. Prompt times begin with the first step and include no waiting."""

    def __init__(self, call: RunningCall) -> None:
        self._call = call
        self._times_ns: dict[int, tuple[int, int]] = {}
        """By choice: the times of its first step and of its first token."""

    def of(self, index: int, chunk: OutputChunk) -> dict[str, Any]:
        """Return `timings` up to this chunk."""
        if index not in self._times_ns and chunk.first_token_ns is not None:
            begun_ns = chunk.first_token_ns if chunk.first_scheduled_ns is None else chunk.first_scheduled_ns
            self._times_ns[index] = begun_ns, chunk.first_token_ns
        begun_ns, first_ns = self._times_ns.get(index, (chunk.at_ns, chunk.at_ns))
        num_cached = chunk.num_cached_tokens
        num_prompt = self._call.requests[index].num_prompt_tokens - num_cached
        return {
            "cache_n": num_cached,
            **_speed("prompt", num_prompt, (first_ns - begun_ns) / 1e6),
            **_speed("predicted", chunk.num_generated_tokens, (chunk.at_ns - first_ns) / 1e6),
        }


def _speed(name: str, number: int, time_ms: float) -> dict[str, Any]:
    return {
        f"{name}_n": number,
        f"{name}_ms": time_ms,
        f"{name}_per_token_ms": time_ms / number if number else 0.0,
        f"{name}_per_second": 1000 * number / time_ms if time_ms else 0.0,
    }
