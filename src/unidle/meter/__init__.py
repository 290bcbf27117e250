"""What the machine does while it trains: readings of GPU and host, and what the GPU waited for."""
