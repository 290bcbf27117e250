"""Generated websites, served on this machine, for training, tests and benchmarks."""
