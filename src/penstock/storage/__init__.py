"""Memory outside of the process. Knows the vocabulary and the engine's ports."""
