"""Triton kernels and the functions that launch them. Import only where Triton is installed."""
