"""The ownership of the KV cache: which request holds which block. Integers only: no tensors, no clock, no I/O."""
