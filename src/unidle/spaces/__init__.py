"""Gymnasium spaces as flat tensors, and distributions over actions."""
