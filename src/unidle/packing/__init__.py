"""Several commands side by side on one machine and GPU."""
