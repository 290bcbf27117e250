"""Environments that unidle ships to train on."""
