"""Environments written in JAX, many at once: what unidle and JAX know of each other.

Tensors change hands by DLPack, without a copy. The state, a JAX pytree, travels as one tensor of 32-bit words: one
exchange a step instead of one per leaf, and a checkpoint holds it like that of any other environment. Keys are folded
from (seed, environment, episode, step), so there is nothing random to keep.
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
    """The rules for one environment, as functions that JAX can trace. They reset nothing by themselves."""

    observation_space: spaces.Space
    action_space: spaces.Discrete | spaces.Box
    reset: Callable[[Array], tuple[Tree, Array]]  # key → state, observation
    # key, state, action → state, observation, reward, terminated, truncated
    step: Callable[[Array, Tree, Array], tuple[Tree, Array, Array, Array, Array]]
    limit: int | None = None  # steps after which unidle truncates; None: the task's own `truncated` says when


def import_package(name: str, wanted_by: str) -> Any:
    """A package that needs JAX; UsageError if it is not installed."""
    # JAX would take three quarters of the GPU's memory at its start, and the policy lives there too.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        package = (error.name or name).partition(".")[0]  # it, or one that it needs itself
        raise UsageError(f"`{wanted_by}` needs the package {package}; run: pip install {package}.") from None


class JaxEnv:
    """N environments of one task."""

    # A JAX call belongs to JAX's own stream; a CUDA graph of torch would record nothing of it.
    traits = Traits(capture_safe=False)

    def __init__(
        self, task: JaxTask, n_envs: int, seed: int, device: torch.device | str = "cpu", first_index: int = 0
    ) -> None:
        import jax
        import jax.numpy as jnp

        self._task, self.n_envs, self.episode_limit = task, n_envs, task.limit
        self.observation_space, self.action_space = task.observation_space, task.action_space
        # PRNGKey takes 32 bits of a seed, which may have 63.
        self._key = jax.random.fold_in(jax.random.PRNGKey(seed & _32_BITS), seed >> 32)
        self._index = jax.device_put(
            jnp.arange(first_index, first_index + n_envs, dtype=jnp.int32), _jax_device(torch.device(device))
        )
        self._words = _Words(jax.eval_shape(self._fresh, self._index[0], jnp.int32(0))[0])
        self._begin_all, self._step_all = jax.jit(self._traced_begin), jax.jit(self._traced_step)

    def begin(self) -> tuple[State, Tensor]:
        """The state in which every environment begins its episode 0, and what it then sees."""
        words, observation = self._begin_all(self._index)
        # The state is a copy: its owner may write to it, and JAX believes that its arrays never change.
        return {"words": torch_from_dlpack(words).clone()}, torch_from_dlpack(observation)

    def step(self, state: State, action: Tensor) -> tuple[State, Step]:
        """One step on flat actions [N, width].

        Taking the tensors in lets JAX wait for torch, and giving the results out lets torch wait for JAX, so neither
        frees memory that the other still reads.
        """
        from jax.dlpack import from_dlpack

        words, *outcome = self._step_all(self._index, from_dlpack(state["words"]), from_dlpack(action.contiguous()))
        return {"words": torch_from_dlpack(words)}, Step(*map(torch_from_dlpack, outcome))

    # -- traced by JAX, once -------------------------------------------------------------------------------------------

    def _fresh(self, index: Array, episode: Array) -> tuple[Tree, Array]:
        """One environment at the start of an episode."""
        import jax.numpy as jnp

        tree, observation = self._task.reset(self._key_of(index, episode, 0))
        return (tree, episode, jnp.zeros_like(episode)), observation

    def _key_of(self, index: Array, episode: Array, draw: Array | int) -> Array:
        from jax.random import fold_in

        return fold_in(fold_in(fold_in(self._key, index), episode), draw)

    def _advanced(self, index: Array, words: Array, action: Array) -> tuple[Tree, Array, Array, Array, Array]:
        """One environment a step on, not yet reset."""
        import jax.numpy as jnp

        tree, episode, length = self._words.unpack(words)
        length = length + 1
        if isinstance(self.action_space, spaces.Discrete):
            action = action[0].astype(jnp.int32)
        else:
            action = action.reshape(self.action_space.shape)
        key = self._key_of(index, episode, length)  # a reset has draw 0, and the first step 1
        tree, observation, reward, terminated, truncated = self._task.step(key, tree, action)
        # Some return plain Python numbers.
        reward, terminated, truncated = jnp.float32(reward), jnp.bool_(terminated), jnp.bool_(truncated)
        if self._task.limit is not None:
            truncated = truncated | (length >= self._task.limit)
        words = self._words.pack((tree, episode, length))
        return words, observation, reward, terminated, truncated & ~terminated

    def _traced_begin(self, index: Array) -> tuple[Array, Array]:
        import jax
        import jax.numpy as jnp

        def begun(index: Array, episode: Array) -> tuple[Array, Array]:
            tree, observation = self._fresh(index, episode)
            return self._words.pack(tree), observation

        return jax.vmap(begun)(index, jnp.zeros_like(index))

    def _traced_step(self, index: Array, words: Array, action: Array) -> tuple[Array, ...]:
        import jax
        import jax.numpy as jnp

        words, final, reward, terminated, truncated = jax.vmap(self._advanced)(index, words, action)
        ended = terminated | truncated

        def begun_anew(index: Array, words: Array, final: Array, ended: Array) -> tuple[Array, Array]:
            _, episode, _ = self._words.unpack(words)
            tree, first = self._fresh(index, episode + 1)
            return jnp.where(ended, self._words.pack(tree), words), jnp.where(ended, first.astype(final.dtype), final)

        # A reset of physics costs as much as a step, and in most steps no episode ends.
        words, observation = jax.lax.cond(
            ended.any(),
            jax.vmap(begun_anew),
            lambda index, words, final, ended: (words, final),
            *(index, words, final, ended),
        )
        return words, observation, final, reward, terminated, truncated


class _Words:
    """The state of one environment as 32-bit words, and back, bit for bit."""

    def __init__(self, shapes: Tree) -> None:
        """`shapes`: the pytree with a shape and a dtype at each leaf."""
        import jax

        self._leaves, self._structure = jax.tree.flatten(shapes)

    def pack(self, tree: Tree) -> Array:
        """[words] int32."""
        import jax
        import jax.numpy as jnp
        from jax.lax import bitcast_convert_type

        parts = []
        for spec, leaf in zip(self._leaves, jax.tree.leaves(tree), strict=True):
            part = jnp.asarray(leaf).astype(spec.dtype)  # a step may widen what the reset made
            bits = _bits(spec.dtype)
            if bits.itemsize < 4:
                part = part if spec.dtype.kind == "b" else bitcast_convert_type(part, bits)
                part = part.astype(jnp.int32)
            parts.append(bitcast_convert_type(part, jnp.int32).ravel())  # 64 bits become two words
        return jnp.concatenate(parts)

    def unpack(self, words: Array) -> Tree:
        """The pytree again."""
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
    """The unsigned integer of the same length."""
    return np.dtype(f"u{dtype.itemsize}")


def space_of(array: Any) -> spaces.Box:
    """The space of observations with this array's shape and dtype, any value allowed."""
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
            "The policy is on the GPU, and JAX sees none; run: pip install 'jax[cuda12]', or use --device cpu."
        ) from None
