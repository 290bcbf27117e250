"""Sweeps: trials of different settings, several at a time, in one process; Optuna chooses the settings."""
