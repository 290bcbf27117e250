"""NumPy implementations for small networks on a CPU, one operation per file."""
