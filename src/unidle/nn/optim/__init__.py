"""The optimiser: all parameters as one flat tensor, and Adam on it."""
