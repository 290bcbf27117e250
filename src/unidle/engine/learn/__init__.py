"""Learning from a rollout."""
