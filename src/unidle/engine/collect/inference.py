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
from unidle.envs.shared_block import SharedBlock
from unidle.kernels.dispatch import Dispatch, compare
from unidle.kernels.numpy.act import ActArrays, NumpyActor
from unidle.nn.actor_critic import ActorCritic
from unidle.nn.numpy_views import numpy_actor, numpy_unsupported

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
        self._capture, self.dispatch = capture, Dispatch(capture.fall_back)
        self._numpy_actor: NumpyActor | None = None
        self._is_verified = False  # on the first real batch
        if not self._on_gpu:
            self._obs_in, self._starts_in = self._block_obs, self._starts
            self._out, self._is_staged = self._staged, True
            self._numpy_unsupported = numpy_unsupported(policy, n_envs)
            if self._numpy_unsupported is None:
                self._numpy_actor = self._new_numpy_actor()
            return
        self._positions = torch.full((n_envs,), steps).pin_memory()
        self._starts = self._starts.pin_memory()
        self._staged = self._staged.pin_memory()
        self._obs_in = torch.zeros_like(self._block_obs, device=device)
        self._positions_in = torch.full((n_envs,), steps, device=device)
        self._starts_in = torch.zeros(n_envs, dtype=torch.bool, device=device)
        self._out = torch.zeros_like(self._staged, device=device)
        self._lines = torch.arange(n_envs, device=device)
        # Not a blocking one: being woken takes half as long as the inference itself. Nor one that knows the time: that
        # takes 7 µs more, so few services have it.
        self._arrived = self._under_way = torch.cuda.Event()
        self._departed, self._arrived_at = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._replay: Callable[[], None] | None = None  # chosen on the first real batch

    # -- which implementation ----------------------------------------------------------------------------------------

    def _new_numpy_actor(self) -> NumpyActor:
        policy, rollout = self.policy, self.rollout
        assert isinstance(policy, ActorCritic)
        chosen = policy.distribution
        ranges = (chosen._scale, chosen._shift, chosen._low, chosen._high)
        tensors = (rollout.obs, rollout.actions_and_trash, self.noise, *ranges)
        arrays = ActArrays(self._block.obs, self._staged.numpy(), *(tensor.numpy() for tensor in tensors))
        return NumpyActor(numpy_actor(policy), arrays)

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

    def _fused(self) -> Callable[[], None] | str:
        """All of an inference as one kernel; or the reason why there is none."""
        if not self._block_obs.is_pinned():
            return "the environments' memory is not page-locked"
        try:
            from unidle.kernels.triton.act import ActTensors, FusedActor, max_blocks
            from unidle.nn.describe import actor_tensors, describe_actor
        except ImportError:  # torch comes without Triton on some platforms
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
            noise=self.noise,
            **actor_tensors(self.policy),
        )
        return mlp.unsupported(len(self._block_obs)) or FusedActor(mlp, tensors, max_blocks(self.rollout.obs.device))

    def _choose_replay(self) -> Callable[[], None]:
        """The fused kernel if it agrees with the plain ones on this batch, else those; either as a CUDA graph."""
        plain, fused = self._infer_there_and_back, self._fused()

        def build() -> Callable[[], None]:
            assert not isinstance(fused, str)
            return fused

        unsupported = fused if isinstance(fused, str) else None
        chosen = self.dispatch.choose("Inference", None, build, self._verify_fused, unsupported)
        if chosen is None:
            return self._capture("inference", plain, [self._state])  # a warm-up would move the recurrent state on
        self._is_staged = False
        # The warm-up writes what the first real call writes again.
        return self._capture("fused inference", chosen, [], plain)

    def _verify_fused(self, fused: Callable[[], None] | None) -> None:
        """RuntimeError unless `fused` gives the actions of the plain kernels for the batch at hand."""
        assert fused is not None
        ready = self._positions < self._steps

        def actions() -> list[Tensor]:
            torch.cuda.current_stream().synchronize()
            kept = self.rollout.actions_and_trash[self._positions.to(self._lines.device), self._lines].cpu()
            return [kept[ready], (self._staged if self._is_staged else self._block_actions)[ready].clone()]

        self._infer_there_and_back()
        expected = actions()
        self._is_staged = False
        fused()
        for ours, theirs in zip(actions(), expected):
            compare("actions", ours, theirs)

    # -- acting ------------------------------------------------------------------------------------------------------

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
        if not self._is_verified:
            positions = np.full(n_envs, self._steps)
            positions[where[1]] = where[0]
            self._choose_numpy(positions)
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
        if self._replay is None:
            self._replay = self._choose_replay()
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
