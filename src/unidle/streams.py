"""Random streams that depend on a key alone."""

from __future__ import annotations

import numpy as np
import torch


def keyed_generator(device: torch.device, *key: int) -> torch.Generator:
    """A stream for this key (run seed, purpose, iteration) and no other: resuming needs no state of it."""
    seed = int(np.random.SeedSequence(list(key)).generate_state(1, np.uint64)[0])
    return torch.Generator(device).manual_seed(seed & 0x7FFFFFFFFFFFFFFF)
