"""The experience of one on-policy iteration, and the scan that turns rewards into returns."""

from __future__ import annotations

import torch
from torch import Tensor


class Rollout:
    """T steps of N environments. Where an episode ends at t, rows[t + 1] already starts the next one."""

    def __init__(
        self, n_steps: int, n_envs: int, obs_bytes: int, width: int, state_size: int, device: torch.device
    ) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.obs = zeros(n_steps + 1, n_envs, obs_bytes, dtype=torch.uint8)  # what was acted on; the last is yet to be
        self.starts = zeros(n_steps + 1, n_envs, dtype=torch.bool)  # rows[t] is the first of its episode
        # As sampled, before scaling and clipping. Inference is always for all environments, and what it says for those
        # that are not ready goes to one step more. (In `obs` it goes to the last, which is written last.)
        self.actions_and_trash = zeros(n_steps + 1, n_envs, width)
        self.actions = self.actions_and_trash[:-1]
        self.rewards = zeros(n_steps, n_envs)
        self.terminated = zeros(n_steps, n_envs, dtype=torch.bool)
        self.truncated = zeros(n_steps, n_envs, dtype=torch.bool)
        # states[t] is the recurrent state that came out of step t - 1, not yet zeroed where rows[t] starts an episode.
        self.states = zeros(n_steps + 1, n_envs, state_size)
        # The true last observation of every episode that was cut off, and where: few, so not a whole second rollout.
        self.final_obs = zeros(0, obs_bytes, dtype=torch.uint8)
        self.final_at = zeros(0, dtype=torch.long)  # t × N + env; T × N where there is none

    @property
    def shape(self) -> tuple[int, int]:
        """(T, N)"""
        return self.rewards.shape[0], self.rewards.shape[1]


def reverse_scan(gain: Tensor, value: Tensor) -> Tensor:
    """y[t] = value[t] + gain[t] · y[t + 1] along dimension 0, y = 0 past the end.

    By doubling: after k rounds every y[t] holds 2^k terms, so 2,048 steps take 11 rounds instead of 2,048.
    """
    y, gain = value.clone(), gain.clone()
    shift, length = 1, len(value)
    while shift < length:
        # Both right-hand sides are computed whole before they are stored, so every round reads the last round's values.
        y[:-shift] = y[:-shift] + gain[:-shift] * y[shift:]
        gain[:-shift] = gain[:-shift] * gain[shift:]
        shift *= 2
    return y


def gae(
    rewards: Tensor,
    values: Tensor,
    bootstrap: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    gamma: float,
    lam: float,
    importance: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalised advantages (Schulman et al. 2016, eq. 16) and the value targets A + V.

    values [T + 1, N] are those of the rows; bootstrap [T, N] is V(final observation) where an episode was truncated.
    A terminated episode is worth nothing after its end; a truncated one what its true final observation is worth.

    importance [T, N]: how much likelier each action is now than it was to the policy that took it. Where it is less
    likely, what came of it counts that much less for the actions before (V-trace: Espeholt et al. 2018, section 4.1;
    but the targets A + V take the step's own action as it was).
    """
    ended = terminated | truncated
    following = torch.where(truncated, bootstrap, values[1:]).masked_fill(terminated, 0.0)
    delta = rewards + gamma * following - values[:-1]
    gain = gamma * lam * (~ended).to(delta.dtype)
    if importance is not None:
        gain[:-1] *= importance[1:].clamp(max=1.0)
    advantages = reverse_scan(gain, delta)
    return advantages, advantages + values[:-1]


def discounted_returns(rewards: Tensor, ended: Tensor, carry: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    """Running discounted sums, forwards: G[t] = r[t] + γ G[t - 1], anew after an episode's end; [T, N].

    `carry` [N] is what is left of the last rollout; returns the sums and the carry for the next.
    """
    follows = torch.cat([torch.ones_like(ended[:1]), ~ended[:-1]]).to(
        rewards.dtype
    )  # step t goes on with t - 1's episode
    first = rewards[0] + gamma * carry
    start = torch.cat([first.unsqueeze(0), rewards[1:]])
    gain = gamma * follows
    sums = reverse_scan(gain.flip(0), start.flip(0)).flip(0)
    return sums, sums[-1] * (~ended[-1]).to(rewards.dtype)
