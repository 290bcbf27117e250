"""Distributions over actions. A policy's network gives the parameters; the distribution does the rest."""

from unidle.spaces.distributions.action import LOG_ZERO, MASKED_BELOW, ActionDistribution, action_distribution
from unidle.spaces.distributions.beta import Beta, BetaParams
from unidle.spaces.distributions.epsilon_greedy import EpsilonGreedy
from unidle.spaces.distributions.gaussian import LOG_SQRT_2PI, Gaussian, Params, SquashedGaussian
from unidle.spaces.distributions.protocol import Distribution, Parameters, RealDistribution
from unidle.spaces.distributions.squashed import LOG_STD_RANGE, SquashedActions
from unidle.spaces.distributions.state_dependent import SquashedStateDependent, StateDependent

# The distributions that kernels and NumPy code support. They check the name, so a new one is not mistaken for these.
KERNEL_DISTRIBUTIONS = frozenset({"categorical", Gaussian.name})

__all__ = [
    "KERNEL_DISTRIBUTIONS",
    "LOG_SQRT_2PI",
    "LOG_STD_RANGE",
    "LOG_ZERO",
    "MASKED_BELOW",
    "ActionDistribution",
    "Beta",
    "BetaParams",
    "Distribution",
    "EpsilonGreedy",
    "Gaussian",
    "Parameters",
    "Params",
    "RealDistribution",
    "SquashedActions",
    "SquashedGaussian",
    "SquashedStateDependent",
    "StateDependent",
    "action_distribution",
]
