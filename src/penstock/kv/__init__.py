"""Bookkeeping of KV memory: which request owns which block. Integers only: no tensors, no clock, no I/O."""
