"""Random streams that depend on a key alone."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

# Purposes of streams: the second part of a key.
NOISE, EVALUATION, SHUFFLE, PREDICTION, PLASTICITY, RANK = 1, 2, 3, 4, 5, 6

# Constants of the 32-bit hash for counter-based random numbers on a device: odd, and all different.
HASH_FACTORS, HASH_EPISODE, HASH_DRAW = (0x21F0AAAD, 0x735A2D97), 0x1E3779B9, 0x05EBCA6B


def keyed_generator(device: torch.device, *key: int) -> torch.Generator:
    """A new generator, seeded by a key (run seed, purpose, iteration), so that resuming needs no saved state."""
    return reseed(torch.Generator(device), *key)


def reseed(generator: torch.Generator, *key: int) -> torch.Generator:
    """Seed `generator` by a key, and return it."""
    seed = int(np.random.SeedSequence(list(key)).generate_state(1, np.uint64)[0])
    return generator.manual_seed(seed & 0x7FFFFFFFFFFFFFFF)


def seed_globally(*key: int) -> None:
    """Seed the global random generators by a key."""
    seed = int(np.random.SeedSequence(list(key)).generate_state(1)[0])
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.manual_seed(seed)


_METHODS = ("uniform_", "normal_", "bernoulli_", "random_", "exponential_", "log_normal_", "cauchy_", "geometric_")
_FUNCTIONS = ("rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial")
# Functions of torch.nn.init that a TorchFunctionMode can intercept.
_INITIALISERS = ("uniform_", "normal_", "kaiming_uniform_")
_DRAWS = {
    *(getattr(Tensor, name) for name in _METHODS),
    *(getattr(torch, name) for name in _FUNCTIONS),
    *(getattr(torch.nn.init, name) for name in _INITIALISERS),
}
_DRAWS_LIKE = {torch.rand_like: Tensor.uniform_, torch.randn_like: Tensor.normal_}


class DrawingFrom(TorchFunctionMode):
    """Within it, this thread draws from `generator` instead of torch's global generator, which all threads share."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self._generator = generator

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _DRAWS_LIKE:
            return self.__torch_function__(_DRAWS_LIKE[func], types, (torch.empty_like(*args, **kwargs),))
        if func in _DRAWS and kwargs.get("generator") is None and self._is_on_device(args, kwargs):
            kwargs = {**kwargs, "generator": self._generator}
        return func(*args, **kwargs)

    def _is_on_device(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        first = args[0] if args else kwargs.get("tensor")
        given = first.device if isinstance(first, Tensor) else kwargs.get("device")
        return torch.device(given or torch.get_default_device()) == self._generator.device


def random_state() -> dict[str, Any]:
    """The state of the global random generators, which the user's network, environments or callbacks may use."""
    version, keys, gauss = random.getstate()
    kind, words, position, has_gauss, cached = np.random.get_state()  # noqa: NPY002
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return {
        "python": [version, list(keys), gauss],
        "numpy": [kind, torch.from_numpy(np.asarray(words, np.int64)), int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
        "cuda": cuda,
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Restore the state of the global random generators."""
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))
    kind, words, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, words.numpy().astype(np.uint32), position, has_gauss, cached))  # noqa: NPY002
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all([part.cpu() for part in state["cuda"]])


@contextlib.contextmanager
def preserved_random_state() -> Iterator[None]:
    """Restore the state of the global random generators at the end, whatever was drawn from them or seeded."""
    state = random_state()
    try:
        yield
    finally:
        restore_random_state(state)
