"""Penstock: an LLM inference server for ordinary machines."""

__version__ = "0.1.0"
