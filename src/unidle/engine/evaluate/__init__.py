"""Evaluation: playing episodes, in the trainer or in processes of their own."""
