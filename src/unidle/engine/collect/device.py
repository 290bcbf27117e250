"""Fills rollouts from environments on the device: inference, sampling, step and storage are captured together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from unidle.algos.capturing import NODES_PER_GRAPH, Capturer, no_capture
from unidle.algos.registry import AnyPolicy
from unidle.buffers.rollout import Rollout
from unidle.config.validate import largest_divisor
from unidle.engine.collect.device_final_obs import CapturedFinalObs, SimulatorFinalObs
from unidle.engine.collect.episode_stats import episode_metrics
from unidle.engine.collect.rollout_noise import RolloutNoise
from unidle.engine.collect.rollout_slot import FinishedRollout
from unidle.engine.turns import Turns
from unidle.envs.device.device_env import DeviceEnv, LoggingDeviceEnv, MaskedDeviceEnv, State, Step, traits_of
from unidle.envs.device.step_log import StepLog
from unidle.envs.open_episode import Difference
from unidle.envs.spec import EnvSpec
from unidle.kernels.dispatch import Dispatch, restored
from unidle.nn.encoder import leaf_tensor, pack_obs
from unidle.rng import NOISE, keyed_generator
from unidle.timeline import ENVIRONMENT, INFERENCE, OTHER, STORAGE, DeviceClock, Timeline

_Result = TypeVar("_Result")
NODES_PER_STEP = 80  # CUDA-graph nodes, roughly
_INEXACT = (
    "The environment does not return the final observation of truncated episodes: "
    "their value is bootstrapped from the observation before it."
)


class DeviceCollector:
    """Acts in the environments and stores what happens, rollout after rollout; the host only launches."""

    n_slots = 1  # open rollouts: the device is either collecting or learning

    def __init__(
        self,
        env: DeviceEnv,
        env_spec: EnvSpec,
        policy: AnyPolicy,
        rollout: Rollout,
        seed: int,
        timeline: Timeline,
        capture: Capturer = no_capture,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.env, self._obs_layout, self.policy, self._rollout = env, env_spec.obs_layout, policy, rollout
        self._seed, self._timeline, self._say = seed, timeline, say
        self._captured = traits_of(env).capture_safe
        self._clock = DeviceClock(timeline) if rollout.obs.is_cuda else None
        device, (steps, n_envs) = rollout.obs.device, rollout.shape
        self.n_envs = n_envs
        self.number = 0
        self.episodes = 0
        self._finished = FinishedRollout(rollout, None)
        # The state of the environments. Captured graphs hold these tensors: they are only changed in place.
        self._state, observation = env.begin()
        self._obs = torch.zeros(n_envs, env_spec.obs_layout.obs_bytes, dtype=torch.uint8, device=device)
        self._pack_obs(observation, self._state, self._obs)
        self._starts = torch.ones(n_envs, dtype=torch.bool, device=device)
        self._recurrent = torch.zeros(n_envs, policy.state_size, device=device)
        self._returns = torch.zeros(n_envs, device=device)  # of the open episodes
        self._lengths = torch.zeros(n_envs, dtype=torch.long, device=device)
        # Sums over ended episodes: count, return, length.
        self._ended = torch.zeros(3, dtype=torch.float64, device=device)
        self._ended_host = torch.zeros(3, dtype=torch.float64)
        if device.type == "cuda":
            self._ended_host = self._ended_host.pin_memory()
        self._last = (0.0, 0.0)
        self._log = StepLog() if isinstance(env, LoggingDeviceEnv) else None
        self._logged: dict[str, float] = {}  # in the latest rollout in which the environment logged anything
        self._noise = RolloutNoise(policy.distribution, rollout)
        self._step_index = torch.zeros(1, dtype=torch.long, device=device)  # the step of the rollout that comes next
        self._final_obs = CapturedFinalObs(rollout, env.episode_limit) if self._captured else SimulatorFinalObs(rollout)
        most = NODES_PER_GRAPH // NODES_PER_STEP if device.type == "cuda" and self._captured else 1
        per_call = largest_divisor(steps, most)
        self._calls = steps // per_call
        self._step: Callable[[], None] = self._take_step if self._captured else self._take_timed_step
        self._kernel: Callable[[], Tensor] | None = None  # fills a rollout in one launch
        self.dispatch = Dispatch(self._report)
        self._kernel_unverified = device.type == "cuda" and self._captured
        capture = capture if self._captured else no_capture
        self._run_steps = capture("rollout", lambda: self._take_steps(per_call), self.carried_state())

    def carried_state(self) -> list[Tensor]:
        """All tensors that carry state from one step to the next."""
        episodes = self._starts, self._recurrent, self._returns, self._lengths, self._ended
        return [*self._state.values(), self._obs, *episodes, self._step_index, *self._final_obs.carried_state]

    def close(self) -> None:
        """Close the environments, if they have `close`."""
        if hasattr(self.env, "close"):
            self.env.close()

    def start(self) -> None:
        """Open the first rollout; the environments are at the start of episode 0 already."""
        self.open_rollout()

    def open_rollout(self) -> None:
        """Draw the next rollout's noise."""
        self._noise.draw(keyed_generator(self._obs.device, self._seed, NOISE, self.number))

    def poll_in_turns(self, seconds: float) -> Turns[bool]:
        """Do nothing: there is no work between rollouts."""
        yield None
        return False

    def finish_in_turns(self) -> Turns[FinishedRollout]:
        """`finish`; there is nothing to wait for, because the device does the work later."""
        yield None
        return self.finish()

    def finish(self) -> FinishedRollout:
        """Fill the rollout."""
        self.reset_episode_stats()
        if self._captured:
            self._timed(INFERENCE, self._fill)
        else:
            self._fill()  # times its steps
        self.copy_episode_stats(1)
        self._timeline.enter(OTHER)
        return self._finished

    def collect(self, generator: torch.Generator) -> Rollout:
        """Draw noise and fill the rollout, for a captured iteration: `finish` without the host's part."""
        self._noise.draw(generator)
        self._fill()
        return self._rollout

    def _fill(self) -> None:
        rollout, steps = self._rollout, self._rollout.shape[0]
        self._step_index.zero_()
        if self._kernel_unverified:
            self._kernel_unverified = False
            self._kernel = self._choose_kernel()
        self._final_obs.begin()
        if self._kernel is not None:
            self._ended.add_(self._kernel())
            self._obs.copy_(rollout.obs[steps])
            return
        with torch.no_grad():
            for _ in range(self._calls):
                self._run_steps()
        self._final_obs.end()
        rollout.obs[steps].copy_(self._obs)
        rollout.starts[steps].copy_(self._starts)
        rollout.states[steps].copy_(self._recurrent)

    def reset_episode_stats(self) -> None:
        """Start counting ended episodes from zero."""
        self._ended.zero_()

    def copy_episode_stats(self, rollouts: int) -> None:
        """Copy the statistics of the latest `rollouts` rollouts to the host, asynchronously."""
        self._ended_host.copy_(self._ended, non_blocking=True)
        self.number += rollouts

    def compile_steps(self) -> None:
        """Compile the step with torch.compile; it runs as it is if that fails."""
        if not self._captured:
            return  # torch.compile cannot see into such a step, and a step that failed halfway could not be repeated
        compiled, plain = torch.compile(self._take_step, dynamic=False), self._take_step

        def try_compiled() -> None:
            kept = [tensor.clone() for tensor in self.carried_state()]
            try:
                compiled()
                self._step = compiled
            except Exception as error:
                self._restore(kept)  # it may have failed halfway
                reason = str(error).strip().partition("\n")[0]
                self._say(f"torch.compile failed on the environment's step, which runs uncompiled and slower: {reason}")
                self._step = plain
                plain()

        self._step = try_compiled

    def _choose_kernel(self) -> Callable[[], Tensor] | None:
        """The kernel that fills a whole rollout, if there is one whose first step agrees with the environment's."""
        try:
            from unidle.engine.collect.rollout_kernel import rollout_kernel
        except ImportError:  # torch comes without Triton on some platforms
            self.dispatch.fallbacks["Rollout"] = "Triton is not installed"
            return None
        episodes = self._starts, self._returns, self._lengths
        kernel = rollout_kernel(self.env, self.policy, self._rollout, self._noise.steps[:-1], self._state, *episodes)

        def build() -> Callable[[], Tensor]:
            assert not isinstance(kernel, str)
            return kernel

        unsupported = kernel if isinstance(kernel, str) else None
        return self.dispatch.choose("Rollout", None, build, self._verify_kernel, unsupported)

    def _verify_kernel(self, kernel: Callable[[], Tensor] | None) -> None:
        """RuntimeError unless the kernel's first step equals the environment's."""
        from unidle.engine.collect.rollout_kernel import check_first_step  # not where there is no Triton

        assert kernel is not None
        rollout, leaf = self._rollout, self._obs_layout.leaves[0]
        with restored(self.carried_state()) as before:
            with torch.no_grad():
                self._take_step()
            expected = [rollout.actions[0].clone(), rollout.rewards[0].clone(), self._starts.clone()]
            expected.append(leaf_tensor(self._obs.clone(), leaf))
            self._restore(before)
            kernel()
            found = [rollout.actions[0], rollout.rewards[0], rollout.starts[1], leaf_tensor(rollout.obs[1], leaf)]
            check_first_step(found, expected)

    def _report(self, operation: str, error: Exception, instead: str) -> None:
        self._say(f"{operation} {instead}, which is slower: {str(error).splitlines()[0]}")

    def _restore(self, kept: list[Tensor]) -> None:
        for tensor, before in zip(self.carried_state(), kept):
            tensor.copy_(before)

    def _take_steps(self, count: int) -> None:
        for _ in range(count):
            self._step()

    def _take_step(self) -> None:
        self._store(*self.env.step(self._state, self._act()))

    def _take_timed_step(self) -> None:
        """`_take_step` of a simulator: its own Python may take longer than anything else."""
        actions = self._timed(INFERENCE, self._act)
        state, step = self._timed(ENVIRONMENT, lambda: self.env.step(self._state, actions))
        self._timed(STORAGE, lambda: self._store(state, step))

    def _timed(self, phase: int, work: Callable[[], _Result]) -> _Result:
        """Do `work`; the host's time and the device's count towards `phase`."""
        self._timeline.enter(phase)
        return self._clock.launch(phase, work) if self._clock else work()

    def _act(self) -> Tensor:
        """Choose actions for the latest observations and store both."""
        rollout, policy, at, obs = self._rollout, self.policy, self._step_index, self._obs
        state = None
        if policy.state_size:
            rollout.states.index_copy_(0, at, self._recurrent.unsqueeze(0))
            state = self._recurrent * ~self._starts.unsqueeze(-1)
        rollout.obs.index_copy_(0, at, obs.unsqueeze(0))
        rollout.starts.index_copy_(0, at, self._starts.unsqueeze(0))
        params, after = policy.act(obs, state)
        if after is not None:
            self._recurrent.copy_(after)
        action = policy.distribution.sample(params, self._noise.at((at,)).squeeze(0))
        rollout.actions.index_copy_(0, at, action.unsqueeze(0))
        return policy.distribution.to_env(action)

    def _store(self, state: State, step: Step) -> None:
        """Store what a step returned, and prepare the next one."""
        rollout, at = self._rollout, self._step_index
        for name, value in self._state.items():
            value.copy_(state[name])
        for field, value in (
            (rollout.rewards, step.reward),
            (rollout.terminated, step.terminated),
            (rollout.truncated, step.truncated),
        ):
            field.index_copy_(0, at, value.unsqueeze(0))
        self._final_obs.store(lambda: self._packed_final(step.final_observation), step.truncated, at)
        self._count_episodes(step.reward, step.terminated | step.truncated)
        self._pack_obs(step.observation, state, self._obs)
        if self._log is not None:
            self._log.add(self.env.logged)  # type: ignore[attr-defined]
        at.add_(1)

    def _pack_obs(self, observation: Tensor, state: State, obs: Tensor) -> None:
        mask = None
        if isinstance(self.env, MaskedDeviceEnv) and self._obs_layout.mask_width:
            mask = self.env.mask(state)
        pack_obs(observation, mask, self._obs_layout, obs)

    def _packed_final(self, observation: Tensor) -> Tensor:
        obs = torch.zeros_like(self._obs)
        pack_obs(observation, None, self._obs_layout, obs)  # no action follows: no mask
        return obs

    def _count_episodes(self, reward: Tensor, ended: Tensor) -> None:
        self._returns.add_(reward)
        self._lengths.add_(1)
        finished = torch.stack((ended.double(), ended * self._returns.double(), ended * self._lengths.double()))
        self._ended.add_(finished.sum(1))
        self._returns.mul_(~ended)
        self._lengths.mul_(~ended)
        self._starts.copy_(ended)

    # -- metrics -----------------------------------------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        """Statistics of the episodes so far, and what the environment logged."""
        return self._logged | episode_metrics(self.recent_returns, self.recent_lengths, self.episodes)

    def read_episode_stats(self) -> None:
        """Read the statistics of the finished rollout, once the device is done with it."""
        count, returns, lengths = self._ended_host.tolist()
        if self._clock is not None:
            self._clock.read()
        self.episodes += int(count)
        if count:
            self._last = returns / count, lengths / count
        if self._log is not None:
            self._logged = self._log.take() or self._logged
        if len(self._rollout.final_at) and not traits_of(self.env).exact_final_observation:
            self._say(_INEXACT)
            self._say = lambda text: None

    @property
    def recent_returns(self) -> list[float]:
        """Mean return of the episodes that ended in the latest rollout in which any did."""
        return [self._last[0]] if self.episodes else []

    @property
    def recent_lengths(self) -> list[float]:
        """Their mean length."""
        return [self._last[1]] if self.episodes else []

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def env_statistics(self) -> dict[str, Any]:
        """Nothing: only the policy normalises."""
        return {}

    def load_env_statistics(self, state: dict[str, Any]) -> None:
        """Do nothing."""

    def state_dict(self) -> dict[str, Any]:
        """The state of the environments and counters."""
        return {
            "number": self.number,
            "moving": [tensor.cpu() for tensor in self.carried_state()],
            "episodes": self.episodes,
            "last": list(self._last),
        }

    def load_state_dict(self, state: dict[str, Any]) -> dict[int, Difference]:
        """Restore; returns the environments whose open episode is lost: all, if their state is not in tensors."""
        resumable = traits_of(self.env).resumable
        if resumable:
            for tensor, value in zip(self.carried_state(), state["moving"], strict=True):
                tensor.copy_(value)
        self.number, self.episodes = state["number"], state["episodes"]
        self._last = (state["last"][0], state["last"][1])
        self.open_rollout()
        lost = Difference("the simulator's state cannot be saved", is_lost=True)
        return {} if resumable else dict.fromkeys(range(self.n_envs), lost)
