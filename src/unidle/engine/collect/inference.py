"""Inference for all environments at once, whichever of them are ready.

The shape is always the whole block: what is said for environments that are not ready goes to a trash row. So one graph
serves every case, and an environment's actions do not depend on which others happened to be ready with it.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from unidle.algos.capturing import Capturer
from unidle.algos.registry import AnyPolicy
from unidle.buffers.rollout import Rollout
from unidle.engine.numpy_actor import NumpyActor
from unidle.envs.shared_block import SharedBlock

_ALREADY_LOCKED = 712  # cudaErrorHostMemoryAlreadyRegistered
_TIMED = 16  # one service in so many is timed on the GPU
Where = tuple[int, slice] | tuple[np.ndarray, np.ndarray]  # [step, environment] of what is ready, as a NumPy index


class PageLock:
    """Keeps the pages of a block in memory, so that copies from it to a GPU run beside everything else.

    Where somebody keeps them there already, it is theirs to give them back.
    """

    def __init__(self, block: SharedBlock) -> None:
        self._address: int | None = np.frombuffer(block.memory, np.uint8).ctypes.data
        error = int(torch.cuda.cudart().cudaHostRegister(self._address, len(block.memory), 0))
        if error:
            self._address = None
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device="cuda")  # CUDA remembers the error until somebody asks; here it is done with
            if error != _ALREADY_LOCKED:
                warnings.warn(
                    f"The environments' memory could not be page-locked (CUDA error {error}): copies to the GPU are "
                    "slower; raise the limit on locked memory (ulimit -l).",
                    stacklevel=2,
                )

    def close(self) -> None:
        """Give the memory back to the pager, while it is still mapped."""
        if self._address is not None:
            torch.cuda.cudart().cudaHostUnregister(self._address)
            self._address = None


class Service:
    """Acts with one policy into one rollout."""

    def __init__(
        self, policy: AnyPolicy, rollout: Rollout, block: SharedBlock, state: Tensor, capture: Capturer
    ) -> None:
        """`state` [N, S] is the recurrent state of the environments as they stand, shared by all services."""
        self.policy, self.rollout = policy, rollout
        device, (steps, n_envs) = rollout.obs.device, rollout.shape
        self._block, self._state, self._steps = block, state, steps
        self._on_gpu = device.type == "cuda"
        self._served = 0
        self.device_ns = 0  # what a service takes on the GPU, by the latest that was timed
        self.noise = torch.zeros_like(rollout.actions_and_trash)
        self._block_obs, self._block_actions = torch.from_numpy(block.obs), torch.from_numpy(block.actions)
        self._starts = torch.zeros(n_envs, dtype=torch.bool)
        # What all environments would get, on the host. Only those that are ready may have theirs in the block: others
        # may just be reading what they got before.
        self._staged = torch.zeros(block.actions.shape)
        self._is_staged = False
        self._numpy_actor: NumpyActor | None = None
        if not self._on_gpu:
            self._obs_in, self._starts_in = self._block_obs, self._starts
            self._out, self._is_staged = self._staged, True
            self._numpy_actor = NumpyActor.of(policy, rollout, block, self.noise, self._staged)
            return
        self._positions = torch.full((n_envs,), steps).pin_memory()
        self._starts = self._starts.pin_memory()
        self._staged = self._staged.pin_memory()
        self._obs_in = torch.zeros_like(self._block_obs, device=device)
        self._positions_in = torch.full((n_envs,), steps, device=device)
        self._starts_in = torch.zeros(n_envs, dtype=torch.bool, device=device)
        self._out = torch.zeros_like(self._staged, device=device)
        self._lines = torch.arange(n_envs, device=device)
        fused = self._fused()
        # Not a blocking one: being woken takes half as long as the inference itself. Nor one that knows the time: that
        # takes 7 µs more, so few services have it.
        self._arrived = self._under_way = torch.cuda.Event()
        self._departed, self._arrived_at = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # The warm-up writes what the first real call writes again; only the recurrent state would move on.
        plain = self._infer_there_and_back
        self._replay = capture("fused inference", fused, [], plain) if fused else capture("inference", plain, [state])

    def _fused(self) -> Callable[[], None] | None:
        """All of it as one kernel, where there is one for such a policy."""
        if not self._block_obs.is_pinned():
            return None
        try:
            from unidle.engine.fused_actor import FusedActor
        except ImportError:  # torch comes without Triton on some platforms
            return None
        obs, positions, actions = self._block_obs, self._positions, self._block_actions
        return FusedActor.of(self.policy, self.rollout, obs, positions, actions, self.noise)

    def serve(self, where: Where, starts: np.ndarray | None) -> None:
        """Put into the block what the environments at `where` are to do; the actions of all others stay as they are.

        `starts` [N] says whose observation begins an episode; needed only by a recurrent policy.
        """
        self.launch(where, starts)
        self.wait(where)

    def launch(self, where: Where, starts: np.ndarray | None) -> None:
        """Begin to `serve`; until `wait` returns, neither observations nor actions there are to be touched."""
        if starts is not None:
            self._starts.numpy()[:] = starts
        if self._on_gpu:
            self._launch_on_gpu(where)
        else:
            self._infer_here(where)

    def wait(self, where: Where) -> None:
        """Until what was launched is in the block."""
        if self._on_gpu:
            self._under_way.synchronize()  # the one wait of the host
            if self._under_way is self._arrived_at:
                self.device_ns = round(1e6 * self._departed.elapsed_time(self._arrived_at))
        if self._is_staged:
            self._block.actions[where[1]] = self._staged.numpy()[where[1]]

    def _infer_here(self, where: Where) -> None:
        n_envs = len(self._block.obs)
        if isinstance(where[0], int) and where[1] == slice(0, n_envs):  # all, in step: plain views, no indexing
            if self._numpy_actor is None:
                self._infer((where[0],), None)
            else:
                self._numpy_actor((where[0],))
            return
        positions, lines = np.full(n_envs, self._steps), np.arange(n_envs)
        positions[where[1]] = where[0]
        if self._numpy_actor is None:
            self._infer((torch.from_numpy(positions), torch.from_numpy(lines)), torch.from_numpy(positions))
        else:
            self._numpy_actor((positions, lines))

    def _launch_on_gpu(self, where: Where) -> None:
        positions = self._positions.numpy()
        positions.fill(self._steps)
        positions[where[1]] = where[0]
        self._served += 1
        is_timed = self._served % _TIMED == 0
        self._under_way = self._arrived_at if is_timed else self._arrived
        if is_timed:
            self._departed.record()
        self._replay()
        self._under_way.record()

    def _infer_there_and_back(self) -> None:
        """From the block to the actions on the host: the copies are part of the graph, so all of it is one launch."""
        self._obs_in.copy_(self._block_obs, non_blocking=True)
        self._positions_in.copy_(self._positions, non_blocking=True)
        if self._state.shape[1]:
            self._starts_in.copy_(self._starts, non_blocking=True)
        self._infer((self._positions_in, self._lines), self._positions_in)
        self._staged.copy_(self._out, non_blocking=True)

    @torch.inference_mode()
    def _infer(self, at: tuple[int] | tuple[Tensor, Tensor], positions: Tensor | None) -> None:
        """Store the block's observations `at` [step, environment], and the actions chosen on them."""
        policy, rollout, state = self.policy, self.rollout, None
        self._is_staged = True
        rollout.obs[at] = self._obs_in
        if policy.state_size:
            rollout.states[at] = self._state
            state = self._state * ~self._starts_in.unsqueeze(-1)
        params, after = policy.act(self._obs_in, state)
        action = policy.distribution.sample(params, self.noise[at])
        rollout.actions_and_trash[at] = action
        if after is not None:
            if positions is not None:  # those that are not ready keep the state they have
                after = torch.where((positions < self._steps).unsqueeze(-1), after, self._state)
            self._state.copy_(after)
        self._out.copy_(policy.distribution.to_env(action))
