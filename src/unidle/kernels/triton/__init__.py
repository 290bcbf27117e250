"""Triton kernels, one operation a file."""
