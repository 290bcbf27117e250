"""Readings of the GPU and the host."""
