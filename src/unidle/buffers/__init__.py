"""Experience: rollouts, advantages and replay buffers, as static tensors on one device."""
