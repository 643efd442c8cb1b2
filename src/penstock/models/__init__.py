"""Architectures described in Python, and the loaders of their weights."""
