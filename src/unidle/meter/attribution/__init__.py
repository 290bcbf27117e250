"""Where the time of a run goes, and what the GPU waited for."""
