"""Log-probabilities and values of a whole rollout, in a few batched passes through the network."""

from __future__ import annotations

import torch
from torch import Tensor

from unidle.algos.micro_batches import MicroBatches
from unidle.buffers.rollout import Rollout
from unidle.config import PPORecipe
from unidle.kernels.dispatch import Report
from unidle.nn.actor_critic import ActorCritic
from unidle.spaces.distributions import Parameters

_MAX_CHUNK_BYTES = 1 << 29  # of activations


def sequences(field: Tensor, length: int) -> Tensor:
    """[T, N, ..] → [T / L · N, L, ..], in order."""
    if length == 1:
        return field.reshape(-1, 1, *field.shape[2:])
    return field.unflatten(0, (-1, length)).transpose(1, 2).flatten(0, 1).contiguous()


class Evaluation:
    """Computes log-probabilities and values of rollouts, which this policy or an older one collected."""

    def __init__(self, policy: ActorCritic, recipe: PPORecipe, length: int, report: Report) -> None:
        """`length` is the length of training sequences; `report` is called if memory runs out."""
        assert isinstance(recipe.batch_size, int)
        self._policy, self._length, self._micro_batches = policy, length, MicroBatches("Evaluation", report)
        # On a CPU, chunks that fit in its caches. On a GPU each chunk costs launches, so chunks are as large as
        # certainly fits in memory; the memory use of a CNN or a custom network is unknown.
        widths = max(sum(recipe.net_arch), sum(recipe.critic_widths)) + policy.encoder.n_features
        is_known = policy.log_std.is_cuda and policy.encoder.is_float_vector
        self._chunk_rows = max(recipe.batch_size, _MAX_CHUNK_BYTES // (4 * widths) if is_known else 4096)

    def score(self, policy: ActorCritic, rollout: Rollout) -> Tensor:
        """Log-probabilities [T, N] of the actions, by `policy`."""
        return policy.distribution.log_prob_and_entropy(self._forward(policy, rollout)[0], rollout.actions)[0]

    @torch.no_grad()
    def rollout(self, rollout: Rollout) -> tuple[Tensor, Tensor]:
        """Log-probabilities [T, N] of the actions, and values [T + 1, N]."""
        policy, score, length = self._policy, self._policy.distribution.log_prob_and_entropy, self._length
        if policy.core is None:
            params, values = self._forward(policy, rollout)
            return score(params, rollout.actions)[0], values

        # The stored recurrent states were computed with the weights that acted. Learning recomputes them from the
        # second step of a sequence on, and so does this.
        def unrolled(obs: Tensor, starts: Tensor, states: Tensor, *actions: Tensor) -> Tensor:
            params, values = policy(obs, starts, states)
            return torch.stack([values, *(score(params, taken)[0] for taken in actions)], -1)

        fields = (rollout.obs[:-1], rollout.starts[:-1], rollout.actions)
        obs, starts, actions = (sequences(field, length) for field in fields)
        states = rollout.states[:-1:length].flatten(0, 1)
        out = self._in_chunks(unrolled, obs, starts, states, actions, rows_each=length)
        values, log_probs = out.unflatten(0, (-1, rollout.shape[1])).transpose(1, 2).flatten(0, 1).unbind(-1)  # [T, N]
        ends = (rollout.obs[-1].unsqueeze(1), rollout.starts[-1].unsqueeze(1), rollout.states[-1])
        last = self._in_chunks(unrolled, *ends).view(1, -1)
        return log_probs.contiguous(), torch.cat((values, last))

    def values(self, obs: Tensor, states: Tensor) -> Tensor:
        """Values of observations [n, obs_bytes] in recurrent states [n, S]."""
        return self._in_chunks(self._policy.value, obs, states)

    def _forward(self, policy: ActorCritic, rollout: Rollout) -> tuple[Parameters, Tensor]:
        """Distribution parameters [T, N, ..] and values [T + 1, N]."""
        lead = rollout.obs.shape[:2]
        obs, starts = rollout.obs.flatten(0, 1), rollout.starts.flatten(0, 1)
        states = rollout.states.flatten(0, 1)

        def one_step(obs: Tensor, starts: Tensor, states: Tensor) -> Tensor:
            # The recurrent state of every step is stored, so the whole rollout is one batch of sequences of length 1.
            params, value = policy(obs.unsqueeze(1), starts.unsqueeze(1), states)
            return torch.cat([policy.distribution.pack(params), value.unsqueeze(-1)], -1).squeeze(1)

        out = self._in_chunks(one_step, obs, starts, states).unflatten(0, lead)
        packed, value = out.split((policy.distribution.n_packed, 1), -1)
        return policy.distribution.unpack(packed[:-1], policy.log_std), value.squeeze(-1).contiguous()

    def _in_chunks(self, function, *columns: Tensor, rows_each: int = 1) -> Tensor:  # type: ignore[no-untyped-def]
        """Apply `function` to chunks of columns, to bound memory use; each entry of a column has `rows_each` rows."""
        size = max(1, self._chunk_rows // rows_each)

        def work(count: int) -> Tensor:
            return torch.cat(
                [function(*chunk) for chunk in zip(*(column.split(-(-size // count)) for column in columns))]
            )

        return self._micro_batches(size, work)
