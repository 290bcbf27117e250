"""What drives a run: collecting, learning, evaluating, checkpoints."""
