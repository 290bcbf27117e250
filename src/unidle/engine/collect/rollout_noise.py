"""The noise that selects the actions of one rollout."""

from __future__ import annotations

import torch
from torch import Tensor

from unidle.buffers.rollout import Rollout
from unidle.spaces.distributions import ActionDistribution


class RolloutNoise:
    """All noise of one rollout, drawn before it begins: for each step, and exploration matrices that steps share.

    A rollout begins with new matrices, and gets others every `matrix_steps` steps.
    """

    def __init__(self, distribution: ActionDistribution, rollout: Rollout) -> None:
        n_steps, n_envs = rollout.shape
        self._distribution, self._job_envs, self._envs = distribution, n_envs, slice(0, n_envs)
        # Actions of environments that are not ready go to step n_steps, so there is noise for that step too.
        like = rollout.actions_and_trash
        # Not zeros_like, which imports sympy on the meta device: that takes a third of a second.
        self.steps = torch.zeros(like.shape, dtype=like.dtype, device=like.device)  # [time + 1, env, heads + reals]
        self._shape, self._steps = (n_steps, n_envs), self.steps[:-1]
        self._interval = min(distribution.real.matrix_steps or n_steps, n_steps)
        n_matrices = n_steps // self._interval + 1 if distribution.n_matrix else 0
        self.matrices = self.steps.new_zeros(n_matrices, n_envs, distribution.n_matrix)
        # What `at` returns, joined here: no memory is allocated for it at every step.
        self._joined = self.steps.new_zeros(n_envs if n_matrices else 0, like.shape[-1] + distribution.n_matrix)

    def take_part(self, rank: int, ranks: int) -> None:
        """Draw the noise of all `ranks` from now on, and use the part of `rank`: an action is that of the same env."""
        n_envs = self._shape[1]
        self._job_envs, self._envs = n_envs * ranks, slice(rank * n_envs, (rank + 1) * n_envs)

    def draw(self, generator: torch.Generator) -> None:
        """Draw the noise of a rollout, in place."""
        self._steps.copy_(self._distribution.noise((self._shape[0], self._job_envs), generator)[:, self._envs])
        if self._distribution.n_matrix:
            matrices = self._distribution.matrices((len(self.matrices), self._job_envs), generator)
            self.matrices.copy_(matrices[:, self._envs])

    def at(self, index: tuple[int] | tuple[Tensor] | tuple[Tensor, Tensor]) -> Tensor:
        """The noise [.., heads + reals + n_matrix] of all environments at [step] or [step, env].

        With exploration matrices, the next call overwrites it.
        """
        noise = self.steps[index]
        if not len(self.matrices):
            return noise
        step, *envs = index
        matrices = self.matrices[(step // self._interval, *envs)]
        joined = self._joined.view(*noise.shape[:-1], -1)
        torch.cat((noise, matrices), -1, out=joined)
        return joined
