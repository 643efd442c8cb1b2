"""Penstock: an LLM inference server for ordinary machines.

The Python API is `LLM` and `AsyncLLM` (`penstock.llm`) and what they take and give (`penstock.inprocess`). Its names are here,
and loaded when used.
Nothing else in this package is promised to stay as it is: docs/python-api.md.
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
    """A name of the API, for which its module is imported: the others of the package need not pay for it."""
    if name in __all__:
        module = importlib.import_module("penstock.llm" if name in ("LLM", "AsyncLLM") else "penstock.inprocess")
        return getattr(module, name)
    raise AttributeError(f"module 'penstock' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
