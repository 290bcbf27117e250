"""Filling rollouts: host environments, device environments, inference, staging."""
