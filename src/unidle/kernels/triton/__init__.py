"""Triton kernels, one operation per file."""
