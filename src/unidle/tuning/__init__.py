"""Diagnoses and tunes training jobs: probes measure each part, a model predicts speed-ups, trials confirm them."""
