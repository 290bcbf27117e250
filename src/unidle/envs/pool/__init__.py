"""Environments in this process or in worker processes, stepped in slices."""
