"""Optimisers of all parameters of a network as one flat tensor."""
