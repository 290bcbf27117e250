"""Batched environments on the GPU: torch, JAX, Brax, gymnax, Isaac Lab and mjlab."""
