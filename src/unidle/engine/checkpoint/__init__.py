"""The run folder, checkpoints, and resuming from them."""
