"""Chooses the gradients of off-policy algorithms on a CPU: NumPy's where they agree with autograd's on the first batch.

With small networks, autograd's overhead exceeds the arithmetic. An algorithm's update stays as it is: only the
functions that compute its gradients are replaced.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from unidle.algos.dqn import DQN
from unidle.algos.off_policy import GradientOf
from unidle.algos.off_policy_verification import proof_batch, sac_proof_batch, spread_values
from unidle.algos.sac import SAC
from unidle.algos.td3 import TD3
from unidle.buffers.replay import Transitions
from unidle.kernels.dispatch import GRADIENT_TOLERANCE, Dispatch, compare, restored
from unidle.kernels.numpy.dqn_gradient import DqnGradient
from unidle.kernels.numpy.sac_gradients import SacGradients
from unidle.kernels.numpy.td3_gradients import Td3Gradients
from unidle.nn.numpy_views import (
    ensemble_unsupported,
    numpy_actor,
    numpy_critics,
    numpy_inputs,
    numpy_q_network,
    off_policy_unsupported,
)
from unidle.nn.optim.flat_parameters import FlatParameters


def choose_sac_gradients(dispatch: Dispatch, sac: SAC, batch: Transitions, noise: Tensor) -> None:
    """Replace SAC's gradients."""
    policy, ensemble, size = sac.policy, sac.critics.ensemble, len(batch)
    references = sac.critic_gradient, sac.actor_gradient

    def build() -> tuple[GradientOf, GradientOf]:
        gradients = SacGradients(
            inputs=numpy_inputs(policy),
            actor=numpy_actor(policy, sac.parameters),
            critics=numpy_critics(ensemble, sac.critic_parameters),
            targets=numpy_critics(sac.targets.ensemble),
            value_limit=sac.recipe.value_limit,
            target_entropy=sac.target_entropy,
        )
        return gradients.critic, gradients.policy

    def verify(ours: tuple[GradientOf, GradientOf]) -> None:
        proof, alpha = sac_proof_batch(sac, batch), sac.alpha(batch)
        with spread_values(sac, proof):
            arguments = [(proof, alpha, noise[0]), (proof, alpha, noise[1])]
            _verify([sac.critic_parameters, sac.parameters], ours, references, arguments)

    discrete = "actions are discrete" if policy.distribution.heads else None
    sac.critic_gradient, sac.actor_gradient = dispatch.choose(
        "The SAC update",
        references,
        build,
        verify,
        discrete or off_policy_unsupported(policy, size) or ensemble_unsupported(ensemble, size),
    )


def choose_td3_gradients(dispatch: Dispatch, td3: TD3, batch: Transitions, noise: Tensor) -> None:
    """Replace TD3's gradients."""
    policy, ensemble, size = td3.policy, td3.critics.ensemble, len(batch)

    def build() -> tuple[GradientOf, GradientOf]:
        gradients = Td3Gradients(
            inputs=numpy_inputs(policy),
            actor=numpy_actor(policy, td3.parameters),
            critics=numpy_critics(ensemble, td3.critic_parameters),
            target_actor=numpy_actor(td3.target_policy),
            target_critics=numpy_critics(td3.target_critics.ensemble),
            noise_std=td3.recipe.target_policy_noise,
            noise_clip=td3.recipe.target_noise_clip,
        )
        return gradients.critic, gradients.policy

    td3.critic_gradient, td3.actor_gradient = dispatch.choose(
        "The TD3 update",
        (td3.critic_gradient, td3.actor_gradient),
        build,
        lambda ours: _verify(
            [td3.critic_parameters, td3.parameters],
            ours,
            (td3.critic_gradient, td3.actor_gradient),
            [(proof_batch(batch, 0.0, 1.0), noise), (proof_batch(batch, 0.0, 1.0),)],
        ),
        off_policy_unsupported(policy, size) or ensemble_unsupported(ensemble, size),
    )


def choose_dqn_gradient(dispatch: Dispatch, dqn: DQN, batch: Transitions, noise: Tensor) -> None:
    """Replace DQN's gradient."""

    def build() -> GradientOf:
        network, target = numpy_q_network(dqn.policy, dqn.parameters), numpy_q_network(dqn.target)
        return DqnGradient(network, target, dqn.recipe.double_dqn)

    def verify(ours: GradientOf) -> None:
        with torch.no_grad():
            values = dqn.policy.values(batch.obs).gather(-1, batch.actions.long().unsqueeze(-1)).squeeze(-1).mean(-1)
        # Errors on both sides of ±1, where the Huber loss turns linear.
        _verify([dqn.parameters], [ours], [dqn.loss_gradient], [(proof_batch(batch, values, 1.0),)])

    dqn.loss_gradient = dispatch.choose(
        "The DQN update",
        dqn.loss_gradient,
        build,
        verify,
        off_policy_unsupported(dqn.policy, len(batch)),
    )


def _verify(
    parameters: Sequence[FlatParameters],
    ours: Sequence[GradientOf],
    references: Sequence[GradientOf],
    arguments: Sequence[tuple[Transitions | Tensor, ...]],
) -> None:
    """RuntimeError unless our gradients and what they return agree with the references'; gradients are restored."""
    for network, gradient, reference, given in zip(parameters, ours, references, arguments, strict=True):
        with restored([network.grad]):
            expected = *reference(*given), network.grad.clone()
            found = *gradient(*given), network.grad
            for name, one, other in zip(("loss", "TD errors", "gradient"), found, expected):
                compare(name, one, other, GRADIENT_TOLERANCE["ieee"])
