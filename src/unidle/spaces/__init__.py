"""Gymnasium spaces as flat tensors, and the distribution that serves each action space."""
