"""Fills a rollout from host environments, one step of all of them at a time: textbook, synchronous collection."""

from __future__ import annotations

from collections import deque
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from unidle.envs.block import Block
from unidle.envs.contract import Contract
from unidle.memory.rollout import Rollout
from unidle.nn.policy import Policy
from unidle.timeline import ENVIRONMENT, INFERENCE, OTHER, Timeline


class HostEnvs(Protocol):
    """Environments on the host: put actions in the block, `send`, `recv`, read the block."""

    contract: Contract
    n_envs: int
    block: Block
    workers: int

    def start(self, episodes: np.ndarray) -> None:
        """Begin the given episode in each environment."""

    def send(self) -> None:
        """Set the environments going on the actions in the block."""

    def recv(self) -> None:
        """Wait until every environment is stepped and the block holds what came of it."""

    def states(self) -> list[dict[str, Any] | None]:
        """Each environment's own state, where it offers one."""

    def resume(self, points: list[tuple[int, np.ndarray, np.ndarray, dict[str, Any] | None]]) -> list[bool]:
        """Bring each open episode back; False where an environment did not repeat itself."""

    def close(self) -> None:
        """End all environments and their processes."""


def keyed_generator(device: torch.device, *key: int) -> torch.Generator:
    """A random stream that depends on its key alone (run seed, purpose, iteration), so that resuming is easy."""
    seed = int(np.random.SeedSequence(list(key)).generate_state(1, np.uint64)[0])
    return torch.Generator(device).manual_seed(seed & 0x7FFFFFFFFFFFFFFF)


class EpisodeLog:
    """The actions of each open episode, so that it can be replayed after a resume."""

    def __init__(self, n_envs: int, width: int) -> None:
        self._width = width
        self._pieces: list[list[np.ndarray]] = [[] for _ in range(n_envs)]

    def extend(self, actions: np.ndarray, ended: np.ndarray) -> None:
        """Add T steps: actions [T, N, width] as the environments got them, and where episodes ended [T, N]."""
        steps = len(actions)
        last_end = np.where(ended.any(0), steps - 1 - ended[::-1].argmax(0), -1)  # [N]
        for env, last in enumerate(last_end):
            if last >= 0:
                self._pieces[env] = []
            if last + 1 < steps:
                self._pieces[env].append(actions[last + 1 :, env].copy())

    def actions(self, env: int) -> np.ndarray:
        """[k, width] since the open episode of `env` began."""
        return np.concatenate([np.zeros((0, self._width), np.float32), *self._pieces[env]])

    def restart(self, env: int, actions: np.ndarray) -> None:
        """Begin again with the actions of a resumed episode."""
        self._pieces[env] = [actions] if len(actions) else []


class Collector:
    """Acts in the environments with the current policy and keeps what happened."""

    def __init__(self, envs: HostEnvs, policy: Policy, rollout: Rollout, seed: int, timeline: Timeline) -> None:
        self.envs, self.policy, self.rollout = envs, policy, rollout
        self._seed, self._timeline = seed, timeline
        self._device = rollout.rows.device
        steps, n_envs = rollout.shape
        width = rollout.actions.shape[2]
        block = envs.block
        self._block_rows = torch.from_numpy(block.rows)
        self._block_actions = torch.from_numpy(block.actions)
        # One view per step, made once: indexing costs as much as a small kernel.
        self._rows_at, self._starts_at = rollout.rows.unbind(), rollout.starts.unbind()
        self._actions_at, self._states_at = rollout.actions.unbind(), rollout.states.unbind()
        # Kept on the host during the rollout, copied to the device once at its end.
        self._rewards = np.zeros((steps, n_envs), np.float32)
        self._terminated = np.zeros((steps, n_envs), np.bool_)
        self._truncated = np.zeros((steps, n_envs), np.bool_)
        self._actions = np.zeros((steps, n_envs, width), np.float32)
        self.log = EpisodeLog(n_envs, width)
        self.recent_returns: deque[float] = deque(maxlen=100)
        self.recent_lengths: deque[int] = deque(maxlen=100)
        self.episodes = 0

    def start(self) -> None:
        """Begin episode 0 everywhere."""
        self.envs.start(np.zeros(self.envs.n_envs, np.int64))
        self.rollout.rows[-1].copy_(self._block_rows)
        self.rollout.starts[-1].fill_(True)

    @torch.inference_mode()
    def collect(self, iteration: int) -> None:
        """Fill the rollout with the next T steps."""
        rollout, block, timeline = self.rollout, self.envs.block, self._timeline
        steps, _ = rollout.shape
        noise = self._noise(iteration).unbind()
        final_rows: list[np.ndarray] = []
        final_at: list[np.ndarray] = []
        rollout.carry_over()
        for t in range(steps):
            timeline.enter(INFERENCE)
            self._act(t, noise[t])
            timeline.enter(ENVIRONMENT)
            self.envs.send()
            self.envs.recv()
            timeline.enter(OTHER)
            self._rewards[t], self._terminated[t], self._truncated[t] = block.reward, block.terminated, block.truncated
            self._rows_at[t + 1].copy_(self._block_rows)
            if block.terminated.any() or block.truncated.any():
                self._note_episodes()
                cut = np.flatnonzero(block.truncated)
                final_rows.append(block.final_rows[cut])
                final_at.append(t * len(block.truncated) + cut)
                ended = torch.from_numpy(block.terminated | block.truncated)
                self._starts_at[t + 1].copy_(ended)
            else:
                self._starts_at[t + 1].fill_(False)
        self._hand_over(final_rows, final_at)
        self.log.extend(self._actions, self._terminated | self._truncated)

    def _act(self, t: int, noise: Tensor) -> None:
        """Choose actions on rows[t]: stored as sampled, and put in the block as the environments get them."""
        policy = self.policy
        state = None
        if policy.state_size:
            state = self._states_at[t] * ~self._starts_at[t].unsqueeze(-1)
        params, after = policy.act(self._rows_at[t], state)
        action = policy.distribution.sample(params, noise)
        self._actions_at[t].copy_(action)
        if after is not None:
            self._states_at[t + 1].copy_(after)
        self._block_actions.copy_(policy.distribution.to_env(action))
        self._actions[t] = self.envs.block.actions

    def _noise(self, iteration: int) -> Tensor:
        """What sampling needs for the whole rollout, a function of seed and iteration: [T, N, width]."""
        generator = keyed_generator(self._device, self._seed, 1, iteration)
        shape, heads = self.rollout.actions.shape, self.policy.distribution.heads
        uniform = torch.rand((*shape[:2], heads), generator=generator, device=self._device)
        normal = torch.randn((*shape[:2], shape[2] - heads), generator=generator, device=self._device)
        return torch.cat([uniform, normal], -1)

    def _note_episodes(self) -> None:
        block = self.envs.block
        ended = np.flatnonzero(block.terminated | block.truncated)
        self.episodes += len(ended)
        self.recent_returns.extend(block.episode_return[ended].tolist())
        self.recent_lengths.extend(block.episode_length[ended].tolist())

    def _hand_over(self, final_rows: list[np.ndarray], final_at: list[np.ndarray]) -> None:
        rollout, device = self.rollout, self._device
        rollout.rewards.copy_(torch.from_numpy(self._rewards))
        rollout.terminated.copy_(torch.from_numpy(self._terminated))
        rollout.truncated.copy_(torch.from_numpy(self._truncated))
        row_bytes = rollout.rows.shape[2]
        rows = np.concatenate([np.zeros((0, row_bytes), np.uint8), *final_rows])
        rollout.final_rows = torch.from_numpy(rows).to(device)
        rollout.final_at = torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *final_at])).to(device)

    # -- what a checkpoint holds ---------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Where each environment stands, and the running statistics of episodes."""
        return {
            "episode": torch.from_numpy(self.envs.block.episode.copy()),
            "rows": self.rollout.rows[-1].cpu(),
            "starts": self.rollout.starts[-1].cpu(),
            "states": self.rollout.states[-1].cpu(),
            "actions": [torch.from_numpy(self.log.actions(env)) for env in range(self.envs.n_envs)],
            "env_states": [_as_tensors(state) for state in self.envs.states()],
            "recent_returns": list(self.recent_returns),
            "recent_lengths": list(self.recent_lengths),
            "episodes": self.episodes,
        }

    def load_state_dict(self, state: dict[str, Any]) -> list[int]:
        """Bring every environment back to where it stood; returns those whose episode had to start anew."""
        rows = state["rows"].numpy()
        actions = [piece.numpy() for piece in state["actions"]]
        env_states = [_as_arrays(part) for part in state["env_states"]]
        points = list(zip(state["episode"].tolist(), actions, rows, env_states))
        repeated = self.envs.resume(points)
        self.rollout.rows[-1].copy_(self._block_rows)
        self.rollout.starts[-1].copy_(state["starts"])
        self.rollout.states[-1].copy_(state["states"])
        lost = [env for env, same in enumerate(repeated) if not same]
        for env in range(self.envs.n_envs):
            self.log.restart(env, actions[env][:0] if env in lost else actions[env])
        for env in lost:
            self.rollout.starts[-1, env] = True
        self.recent_returns.extend(state["recent_returns"])
        self.recent_lengths.extend(state["recent_lengths"])
        self.episodes = state["episodes"]
        return lost


def _as_tensors(value: Any) -> Any:
    """An environment's state in types that load without unpickling code."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return {key: _as_tensors(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_tensors(part) for part in value]
    return value


def _as_arrays(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.numpy()
    if isinstance(value, dict):
        return {key: _as_arrays(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_as_arrays(part) for part in value]
    return value
