"""NumPy implementations for small networks on a CPU, one operation a file."""
