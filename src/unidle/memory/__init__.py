"""What was experienced: static tensors on one device."""
