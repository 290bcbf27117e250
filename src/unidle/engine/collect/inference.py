"""Inference: one batch for all environments; those that are ready get their actions.

The batch always has the shape of the whole block; results for environments that are not ready go to a trash row. So one
CUDA graph is enough, and an environment's actions do not depend on which others are ready at the same time.
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
from unidle.engine.collect.rollout_noise import RolloutNoise
from unidle.engine.cuda_graphs import graph_handle
from unidle.envs.shared_block import SharedBlock
from unidle.kernels.dispatch import Dispatch, compare
from unidle.kernels.numpy.act import ActArrays, NumpyActor
from unidle.nn.numpy_views import acting_unsupported, numpy_acting

_ALREADY_LOCKED = 712  # cudaErrorHostMemoryAlreadyRegistered
_TIME_EVERY = 16  # one inference in this many is timed on the GPU
# NumPy index [step, env] of the environments that are ready.
StepEnvIndex = tuple[int, slice] | tuple[np.ndarray, np.ndarray]


class PageLock:
    """Page-locks a block of memory, so that copies between it and a GPU are asynchronous.

    Does nothing if the memory is already locked; then its owner unlocks it.
    """

    def __init__(self, block: SharedBlock) -> None:
        self._address: int | None = np.frombuffer(block.memory, np.uint8).ctypes.data
        error = int(torch.cuda.cudart().cudaHostRegister(self._address, len(block.memory), 0))
        if error:
            self._address = None
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device="cuda")  # clears the error, which CUDA would report on the next call
            if error != _ALREADY_LOCKED:
                warnings.warn(
                    f"The environments' memory could not be page-locked (CUDA error {error}): copies to the GPU are "
                    "slower; raise the limit on locked memory (ulimit -l).",
                    stacklevel=2,
                )

    def close(self) -> None:
        """Unlock the pages; call it while the memory is still mapped."""
        if self._address is not None:
            torch.cuda.cudart().cudaHostUnregister(self._address)
            self._address = None


class Inference:
    """Infers actions with one policy, and stores observations and actions in one rollout."""

    def __init__(
        self,
        policy: AnyPolicy,
        rollout: Rollout,
        block: SharedBlock,
        state: Tensor,
        capture: Capturer,
        at_once: int = 1,
    ) -> None:
        """`state` [N, S] is the current recurrent state of all environments, shared by all rollout slots.

        `at_once`: so many inferences of this process may run on the GPU at the same time.
        """
        self.policy, self.rollout, self._at_once = policy, rollout, at_once
        device, (steps, n_envs) = rollout.obs.device, rollout.shape
        self._block, self._state, self._steps = block, state, steps
        self._on_gpu = device.type == "cuda"
        self._count = 0
        self.device_ns = 0  # GPU time of the latest timed inference
        self.noise = RolloutNoise(policy.distribution, rollout)
        self._block_obs, self._block_actions = torch.from_numpy(block.obs), torch.from_numpy(block.actions)
        self._starts = torch.zeros(n_envs, dtype=torch.bool)
        # Actions of the whole batch, on the host. Only the actions of ready environments are copied to the block: the
        # other environments may still be reading their previous actions there.
        self._staged = torch.zeros(block.actions.shape)
        self._is_staged = False
        self._capture, self.dispatch = capture, Dispatch(capture.fall_back)
        self._numpy_actor: NumpyActor | None = None
        self._is_verified = False  # on the first real batch
        self._positions = torch.full((n_envs,), steps)
        if not self._on_gpu:
            self._obs_in, self._starts_in = self._block_obs, self._starts
            self._out, self._is_staged = self._staged, True
            self._numpy_unsupported = acting_unsupported(policy, n_envs)
            if self._numpy_unsupported is None:
                self._numpy_actor = self._new_numpy_actor()
            return
        self._positions = self._positions.pin_memory()
        self._starts = self._starts.pin_memory()
        self._staged = self._staged.pin_memory()
        self._obs_in = torch.zeros_like(self._block_obs, device=device)
        self._positions_in = torch.full((n_envs,), steps, device=device)
        self._starts_in = torch.zeros(n_envs, dtype=torch.bool, device=device)
        self._out = torch.zeros_like(self._staged, device=device)
        self._env_ids = torch.arange(n_envs, device=device)
        # No blocking events: waking up takes half as long as the inference itself. Timing adds 7 µs, so only one
        # inference in `_TIME_EVERY` uses the timed events.
        self._done = self._pending = torch.cuda.Event()
        self._timed_start, self._timed_done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._replay: Callable[[], None] | None = None  # chosen on the first real batch

    # -- for code in C (engine/collect/step_loop.py) -------------------------------------------------------------------

    @property
    def positions(self) -> np.ndarray:
        """[N] what `graph` infers for: the step of each environment that is ready, and T for the others."""
        return self._positions.numpy()

    @property
    def staged(self) -> np.ndarray | None:
        """[N, A] where `graph` leaves actions; None: in the block, those of ready environments."""
        return self._staged.numpy() if self._is_staged else None

    @property
    def graph(self) -> int | None:
        """The handle of the CUDA graph that infers; None before the first inference, and if nothing was captured."""
        return graph_handle(self._replay) if self._on_gpu and self._replay is not None else None

    # -- which implementation ----------------------------------------------------------------------------------------

    def _new_numpy_actor(self) -> NumpyActor:
        rollout, distribution = self.rollout, self.policy.distribution
        ranges = (distribution.scale, distribution.shift, distribution.low, distribution.high)
        tensors = (rollout.obs, rollout.actions_and_trash, self.noise.steps, *ranges)
        arrays = ActArrays(self._block.obs, self._staged.numpy(), *(tensor.numpy() for tensor in tensors))
        return NumpyActor(*numpy_acting(self.policy), arrays)

    def _choose_numpy(self, positions: np.ndarray) -> None:
        """Keep the NumPy actor if it agrees with torch on this batch."""
        self._is_verified = True
        at = (positions, np.arange(len(positions)))

        def verify(actor: NumpyActor | None) -> None:
            assert actor is not None
            place = torch.from_numpy(positions)
            self._infer((place, torch.from_numpy(at[1])), place)
            expected = self._staged.clone(), self.rollout.actions_and_trash[at].clone()
            actor(at)
            for ours, theirs in zip((self._staged, self.rollout.actions_and_trash[at]), expected):
                compare("actions", ours, theirs)

        self._numpy_actor = self.dispatch.choose(
            "Inference", None, lambda: self._numpy_actor, verify, self._numpy_unsupported
        )

    def _new_fused_actor(self) -> Callable[[], None] | str:
        """The whole inference as one kernel, or the reason why there is none."""
        if not self._block_obs.is_pinned():
            return "the environments' memory is not page-locked"
        try:
            from unidle.kernels.triton.act import ActTensors, FusedActor, max_blocks
            from unidle.nn.describe import actor_tensors, describe_actor
        except ImportError:  # some builds of torch come without Triton
            return "Triton is not installed"
        mlp = describe_actor(self.policy)
        if isinstance(mlp, str):
            return mlp
        tensors = ActTensors(
            obs=self._block_obs,
            positions=self._positions,
            env_actions=self._block_actions,
            rollout_obs=self.rollout.obs,
            rollout_actions=self.rollout.actions_and_trash,
            noise=self.noise.steps,
            **actor_tensors(self.policy),
        )
        blocks = max_blocks(self.rollout.obs.device, self._at_once)
        return mlp.unsupported(len(self._block_obs)) or FusedActor(mlp, tensors, blocks)

    def _choose_replay(self) -> Callable[[], None]:
        """The fused kernel if it agrees with plain inference on this batch, else plain inference; as a CUDA graph."""
        plain, fused = self._infer_on_gpu, self._new_fused_actor()

        def build() -> Callable[[], None]:
            assert not isinstance(fused, str)
            return fused

        unsupported = fused if isinstance(fused, str) else None
        chosen = self.dispatch.choose("Inference", None, build, self._verify_fused, unsupported)
        if chosen is None:
            return self._capture("inference", plain, [self._state])  # the warm-up advances the recurrent state
        self._is_staged = False
        # There is nothing to restore after the warm-up: the first real call writes the same tensors.
        return self._capture("fused inference", chosen, [], plain)

    def _verify_fused(self, fused: Callable[[], None] | None) -> None:
        """RuntimeError unless `fused` gives the same actions as plain inference for the current batch."""
        assert fused is not None
        ready = self._positions < self._steps

        def actions() -> list[Tensor]:
            torch.cuda.current_stream().synchronize()
            kept = self.rollout.actions_and_trash[self._positions.to(self._env_ids.device), self._env_ids].cpu()
            return [kept[ready], (self._staged if self._is_staged else self._block_actions)[ready].clone()]

        self._infer_on_gpu()
        expected = actions()
        self._is_staged = False
        fused()
        for ours, theirs in zip(actions(), expected):
            compare("actions", ours, theirs)

    # -- acting ------------------------------------------------------------------------------------------------------

    def act(self, where: StepEnvIndex, starts: np.ndarray | None) -> None:
        """Write the actions of the environments at `where` to the block; the others' actions do not change.

        `starts` [N] marks observations that begin an episode; only a recurrent policy needs it.
        """
        self.launch(where, starts)
        self.wait(where)

    def launch(self, where: StepEnvIndex, starts: np.ndarray | None) -> None:
        """Start `act`; observations and actions at `where` must not be changed until `wait` returns."""
        if starts is not None:
            self._starts.numpy()[:] = starts
        if self._on_gpu:
            self._launch_on_gpu(where)
        else:
            self._infer_on_cpu(where)

    def is_done(self) -> bool:
        """Whether `wait` would return at once."""
        return not self._on_gpu or self._pending.query()

    def wait(self, where: StepEnvIndex) -> None:
        """Wait until the actions are in the block."""
        if self._on_gpu:
            self._pending.synchronize()  # the only wait of the host
            if self._pending is self._timed_done:
                self.device_ns = round(1e6 * self._timed_start.elapsed_time(self._timed_done))
        if self._is_staged:
            self._block.actions[where[1]] = self._staged.numpy()[where[1]]

    def _infer_on_cpu(self, where: StepEnvIndex) -> None:
        n_envs = len(self._block.obs)
        if not self._is_verified:
            positions = np.full(n_envs, self._steps)
            positions[where[1]] = where[0]
            self._choose_numpy(positions)
        if isinstance(where[0], int) and where[1] == slice(0, n_envs):  # all at the same step: no indexing
            if self._numpy_actor is None:
                self._infer((where[0],), None)
            else:
                self._numpy_actor((where[0],))
            return
        positions, env_ids = np.full(n_envs, self._steps), np.arange(n_envs)
        positions[where[1]] = where[0]
        if self._numpy_actor is None:
            self._infer((torch.from_numpy(positions), torch.from_numpy(env_ids)), torch.from_numpy(positions))
        else:
            self._numpy_actor((positions, env_ids))

    def _launch_on_gpu(self, where: StepEnvIndex) -> None:
        positions = self._positions.numpy()
        positions.fill(self._steps)
        positions[where[1]] = where[0]
        if self._replay is None:
            self._replay = self._choose_replay()
        self._count += 1
        is_timed = self._count % _TIME_EVERY == 0
        self._pending = self._timed_done if is_timed else self._done
        if is_timed:
            self._timed_start.record()
        self._replay()
        self._pending.record()

    def _infer_on_gpu(self) -> None:
        """Infer, with copies from and to the host; all of it is captured as one graph, so it is one launch."""
        self._obs_in.copy_(self._block_obs, non_blocking=True)
        self._positions_in.copy_(self._positions, non_blocking=True)
        if self._state.shape[1]:
            self._starts_in.copy_(self._starts, non_blocking=True)
        self._infer((self._positions_in, self._env_ids), self._positions_in)
        self._staged.copy_(self._out, non_blocking=True)

    @torch.inference_mode()
    def _infer(self, at: tuple[int] | tuple[Tensor, Tensor], positions: Tensor | None) -> None:
        """Infer actions for the block's observations; store both at [step, env] `at` of the rollout."""
        policy, rollout, state = self.policy, self.rollout, None
        self._is_staged = True
        rollout.obs[at] = self._obs_in
        if policy.state_size:
            rollout.states[at] = self._state
            state = self._state * ~self._starts_in.unsqueeze(-1)
        params, after = policy.act(self._obs_in, state)
        action = policy.distribution.sample(params, self.noise.at(at))
        rollout.actions_and_trash[at] = action
        if after is not None:
            if positions is not None:  # environments that are not ready keep their state
                after = torch.where((positions < self._steps).unsqueeze(-1), after, self._state)
            self._state.copy_(after)
        self._out.copy_(policy.distribution.to_env(action))
