"""Evaluation: plays episodes in the trainer or in separate processes."""
