"""Fast implementations of single operations: Triton for a GPU, NumPy for a CPU. They take tensors and plain numbers."""
