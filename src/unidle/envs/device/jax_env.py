"""Batched JAX environments as DeviceEnvs.

Tensors are exchanged by DLPack, without a copy. The state, a JAX pytree, is packed into one tensor of 32-bit words: one
exchange per step instead of one per leaf, and checkpoints store it like any other state. Keys are folded from (seed,
environment, episode, step), so there is no random state to save.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor
from torch.utils.dlpack import from_dlpack as torch_from_dlpack

from unidle.envs.device.device_env import State, Step, Traits
from unidle.errors import UsageError

Tree = Any  # a JAX pytree
Array = Any  # a jax.Array, or the tracer of one
_32_BITS = 0xFFFFFFFF


@dataclass(frozen=True)
class JaxTask:
    """One environment as functions that JAX can trace; they do not reset automatically."""

    observation_space: spaces.Space
    action_space: spaces.Discrete | spaces.Box
    reset: Callable[[Array], tuple[Tree, Array]]  # key → state, observation
    # key, state, action → state, observation, reward, terminated, truncated
    step: Callable[[Array, Tree, Array], tuple[Tree, Array, Array, Array, Array]]
    limit: int | None = None  # steps after which unidle truncates; None: only the task's own `truncated` counts


def import_package(name: str, env_name: str) -> Any:
    """Import a package that needs JAX; UsageError if it is not installed."""
    # By default JAX preallocates three quarters of the GPU's memory, which the policy needs too.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        package = (error.name or name).partition(".")[0]  # the package, or a dependency of it
        raise UsageError(f"`{env_name}` needs the package {package}; run: pip install {package}.") from None


class JaxEnv:
    """N environments of one task."""

    # JAX uses its own CUDA stream, which a CUDA graph of torch does not capture.
    traits = Traits(capture_safe=False)

    def __init__(
        self, task: JaxTask, n_envs: int, seed: int, device: torch.device | str = "cpu", first_index: int = 0
    ) -> None:
        import jax
        import jax.numpy as jnp

        self._task, self.n_envs, self.episode_limit = task, n_envs, task.limit
        self.observation_space, self.action_space = task.observation_space, task.action_space
        # PRNGKey uses 32 bits of a seed, which may have 63.
        self._key = jax.random.fold_in(jax.random.PRNGKey(seed & _32_BITS), seed >> 32)
        self._index = jax.device_put(
            jnp.arange(first_index, first_index + n_envs, dtype=jnp.int32), _jax_device(torch.device(device))
        )
        self._words = _Words(jax.eval_shape(self._reset_one, self._index[0], jnp.int32(0))[0])
        self._begin_all, self._step_all = jax.jit(self._traced_begin), jax.jit(self._traced_step)

    def begin(self) -> tuple[State, Tensor]:
        """Return the state and observation at the start of episode 0 of every environment."""
        words, observation = self._begin_all(self._index)
        # Copied: the caller may write to the state, and JAX assumes that its arrays are immutable.
        return {"words": torch_from_dlpack(words).clone()}, torch_from_dlpack(observation)

    def step(self, state: State, action: Tensor) -> tuple[State, Step]:
        """Step with flat actions [N, width].

        The DLPack imports make JAX wait for torch and torch wait for JAX, so neither frees memory that the other still
        reads.
        """
        from jax.dlpack import from_dlpack

        words, *results = self._step_all(self._index, from_dlpack(state["words"]), from_dlpack(action.contiguous()))
        return {"words": torch_from_dlpack(words)}, Step(*map(torch_from_dlpack, results))

    # -- traced once by JAX -------------------------------------------------------------------------------------------

    def _reset_one(self, index: Array, episode: Array) -> tuple[Tree, Array]:
        """Reset one environment: its state and observation at the start of an episode."""
        import jax.numpy as jnp

        tree, observation = self._task.reset(self._key_of(index, episode, 0))
        return (tree, episode, jnp.zeros_like(episode)), observation

    def _key_of(self, index: Array, episode: Array, draw: Array | int) -> Array:
        from jax.random import fold_in

        return fold_in(fold_in(fold_in(self._key, index), episode), draw)

    def _step_one(self, index: Array, words: Array, action: Array) -> tuple[Tree, Array, Array, Array, Array]:
        """Step one environment, without resetting it."""
        import jax.numpy as jnp

        tree, episode, length = self._words.unpack(words)
        length = length + 1
        if isinstance(self.action_space, spaces.Discrete):
            action = action[0].astype(jnp.int32)
        else:
            action = action.reshape(self.action_space.shape)
        key = self._key_of(index, episode, length)  # 0 is the reset, 1 the first step
        tree, observation, reward, terminated, truncated = self._task.step(key, tree, action)
        # Some environments return plain Python numbers.
        reward, terminated, truncated = jnp.float32(reward), jnp.bool_(terminated), jnp.bool_(truncated)
        if self._task.limit is not None:
            truncated = truncated | (length >= self._task.limit)
        words = self._words.pack((tree, episode, length))
        return words, observation, reward, terminated, truncated & ~terminated

    def _traced_begin(self, index: Array) -> tuple[Array, Array]:
        import jax
        import jax.numpy as jnp

        def start(index: Array, episode: Array) -> tuple[Array, Array]:
            tree, observation = self._reset_one(index, episode)
            return self._words.pack(tree), observation

        return jax.vmap(start)(index, jnp.zeros_like(index))

    def _traced_step(self, index: Array, words: Array, action: Array) -> tuple[Array, ...]:
        import jax
        import jax.numpy as jnp

        words, final, reward, terminated, truncated = jax.vmap(self._step_one)(index, words, action)
        ended = terminated | truncated

        def reset_ended(index: Array, words: Array, final: Array, ended: Array) -> tuple[Array, Array]:
            _, episode, _ = self._words.unpack(words)
            tree, first = self._reset_one(index, episode + 1)
            return jnp.where(ended, self._words.pack(tree), words), jnp.where(ended, first.astype(final.dtype), final)

        # A physics reset costs as much as a step, and in most steps no episode ends.
        words, observation = jax.lax.cond(
            ended.any(),
            jax.vmap(reset_ended),
            lambda index, words, final, ended: (words, final),
            *(index, words, final, ended),
        )
        return words, observation, final, reward, terminated, truncated


class _Words:
    """Packs the state of one environment into 32-bit words and back, bit for bit."""

    def __init__(self, shapes: Tree) -> None:
        """`shapes`: the pytree with the shape and dtype of each leaf."""
        import jax

        self._leaves, self._structure = jax.tree.flatten(shapes)

    def pack(self, tree: Tree) -> Array:
        """[words] int32."""
        import jax
        import jax.numpy as jnp
        from jax.lax import bitcast_convert_type

        parts = []
        for spec, leaf in zip(self._leaves, jax.tree.leaves(tree), strict=True):
            part = jnp.asarray(leaf).astype(spec.dtype)  # a step may return a wider dtype than the reset
            bits = _bits(spec.dtype)
            if bits.itemsize < 4:
                part = part if spec.dtype.kind == "b" else bitcast_convert_type(part, bits)
                part = part.astype(jnp.int32)
            parts.append(bitcast_convert_type(part, jnp.int32).ravel())  # 64 bits become two words
        return jnp.concatenate(parts)

    def unpack(self, words: Array) -> Tree:
        """The inverse of `pack`."""
        import jax
        from jax.lax import bitcast_convert_type

        leaves, start = [], 0
        for spec in self._leaves:
            bits = _bits(spec.dtype)
            shape = (*spec.shape, 2) if bits.itemsize == 8 else spec.shape
            end = start + int(np.prod(shape, dtype=np.int64))
            part, start = words[start:end].reshape(shape), end
            if bits.itemsize < 4:
                part = part.astype(bits)
            leaves.append(part.astype(bool) if spec.dtype.kind == "b" else bitcast_convert_type(part, spec.dtype))
        return jax.tree.unflatten(self._structure, leaves)


def _bits(dtype: np.dtype) -> np.dtype:
    """The unsigned integer dtype of the same size."""
    return np.dtype(f"u{dtype.itemsize}")


def space_of(array: Any) -> spaces.Box:
    """An unbounded Box with the shape and dtype of an array."""
    dtype = np.dtype(array.dtype)
    if dtype.kind == "f":
        return spaces.Box(-np.inf, np.inf, array.shape, np.float32)
    if dtype.kind == "b":
        return spaces.Box(0, 1, array.shape, np.uint8)
    return spaces.Box(np.iinfo(dtype).min, np.iinfo(dtype).max, array.shape, dtype.type)


def _jax_device(device: torch.device) -> Any:
    import jax

    try:
        return jax.devices(device.type)[device.index or 0]
    except RuntimeError:
        raise UsageError(
            "The policy is on the GPU, but JAX finds no GPU; run: pip install 'jax[cuda12]', or use --device cpu."
        ) from None
