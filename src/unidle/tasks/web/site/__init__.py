"""Generated websites, served on this machine: to train on, to test and to measure."""
