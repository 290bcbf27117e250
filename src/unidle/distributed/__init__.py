"""Data-parallel training: one run on several processes (ranks), each with its share of environments and batches."""
