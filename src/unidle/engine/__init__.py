"""The training loop: collecting, learning, evaluating, checkpoints."""
