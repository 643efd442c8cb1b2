"""Who owns which block of the KV cache. Integers only: no tensors, no clock, no I/O."""
