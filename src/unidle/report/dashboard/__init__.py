"""The dashboard: a run's files → segments of time → one view, which a page draws, live or as a file of its own."""
