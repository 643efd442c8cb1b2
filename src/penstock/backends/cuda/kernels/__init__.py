"""Triton kernels of the cuda backend, and the functions that launch them on a step. Imported only where Triton is installed."""
