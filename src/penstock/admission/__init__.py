"""Admission control: which calls are accepted. No clock, no randomness, no I/O."""
