"""The dashboard: a run's files become segments of time and one view, which a page draws live or as a single file."""
