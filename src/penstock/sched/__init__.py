"""The scheduler and its policies: which requests run in the next step. No clock, no randomness, no I/O."""
