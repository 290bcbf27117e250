"""Measures the machine during training: GPU and host sensors, and the causes of GPU idle time."""
