"""Random streams that depend on a key alone."""

from __future__ import annotations

import numpy as np
import torch

# What a stream is for: the second part of its key.
NOISE, EVALUATION, SHUFFLE, PREDICTION, PLASTICITY = 1, 2, 3, 4, 5

# Of the 32-bit hash behind counter-based random numbers on a device: odd, and all different.
HASH_FACTORS, HASH_EPISODE, HASH_DRAW = (0x21F0AAAD, 0x735A2D97), 0x1E3779B9, 0x05EBCA6B


def keyed_generator(device: torch.device, *key: int) -> torch.Generator:
    """A stream for this key (run seed, purpose, iteration) and no other: resuming needs no state of it."""
    return rekeyed(torch.Generator(device), *key)


def rekeyed(generator: torch.Generator, *key: int) -> torch.Generator:
    """`generator`, from now on the stream for this key."""
    seed = int(np.random.SeedSequence(list(key)).generate_state(1, np.uint64)[0])
    return generator.manual_seed(seed & 0x7FFFFFFFFFFFFFFF)
