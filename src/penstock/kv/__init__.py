"""Which request owns which KV block. Integers only: no tensors, no clock, no I/O."""
