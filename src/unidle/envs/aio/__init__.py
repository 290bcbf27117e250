"""Environments that wait for I/O: hundreds of episodes in flight on an event loop."""
