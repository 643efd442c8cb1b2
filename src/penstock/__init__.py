"""Penstock: an LLM inference server for ordinary machines.

The Python API is `LLM` and `AsyncLLM` (`penstock.llm`) with their parameters and results (`penstock.inprocess`). This module
exports their names. Everything else may change in any release: docs/python-api.md.
"""

import importlib

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncLLM",
    "ChatOptions",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "Logprob",
    "Message",
    "PenstockError",
    "Prompt",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "__version__",
]


def __getattr__(name: str) -> object:
    """Import a name of the API on first use, so that importing the package stays cheap."""
    if name in __all__:
        module = importlib.import_module("penstock.llm" if name in ("LLM", "AsyncLLM") else "penstock.inprocess")
        return getattr(module, name)
    raise AttributeError(f"module 'penstock' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
