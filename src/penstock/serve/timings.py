"""llama.cpp's `timings`."""

from __future__ import annotations

from typing import Any

from penstock.calls.in_flight import RunningCall
from penstock.engine.ports import OutputChunk


def timings(call: RunningCall, index: int, chunk: OutputChunk) -> dict[str, Any]:
    """Return `timings` of choice `index` up to this chunk. The prompt's are those of its first choice, without waiting."""
    first, token_ns = call.first_of(index), call.requests[index].first_token_ns or chunk.at_ns
    read_ns = first.first_token_ns or token_ns
    begun_ns = first.first_scheduled_ns or read_ns
    num_cached = first.num_cached_tokens
    return {
        "cache_n": num_cached,
        **_speed("prompt", first.num_prompt_tokens - num_cached, (read_ns - begun_ns) / 1e6),
        **_speed("predicted", chunk.num_generated_tokens, (chunk.at_ns - token_ns) / 1e6),
    }


def _speed(name: str, number: int, time_ms: float) -> dict[str, Any]:
    return {
        f"{name}_n": number,
        f"{name}_ms": time_ms,
        f"{name}_per_token_ms": time_ms / number if number else 0.0,
        f"{name}_per_second": 1000 * number / time_ms if time_ms else 0.0,
    }
