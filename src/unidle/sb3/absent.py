"""Attributes of Stable-Baselines3's models that unidle's do not have, each with the way out."""

from __future__ import annotations

from typing import Any, TypeVar

from unidle.errors import UsageError

_NETWORKS = "its networks are in model.policy, and the algorithm's state is in get_parameters()"
_BUFFER = "PPO has no replay buffer"
_LEARN = "training is a run of unidle's own loop; call learn"
_ABSENT = {
    **dict.fromkeys(("actor", "actor_target", "critic", "critic_target", "q_net", "q_net_target"), _NETWORKS),
    **dict.fromkeys(("log_ent_coef", "ent_coef_tensor", "ent_coef_optimizer"), _NETWORKS),
    **dict.fromkeys(("replay_buffer", "save_replay_buffer", "load_replay_buffer"), _BUFFER),
    **dict.fromkeys(("train", "collect_rollouts"), _LEARN),
    "rollout_buffer": "a callback has rewards, dones and infos of each step in self.locals",
    "exploration_rate": "it does not explore with random actions",
    "ep_success_buffer": "EvalCallback and evaluate_policy have the results of evaluations",
}

Class = TypeVar("Class", bound=type)


class AbsentAttributeError(UsageError, AttributeError):
    """An attribute that unidle's models do not have; `hasattr` is False."""


class _AbsentAttribute:
    """Raises when it is read; a script may assign it."""

    def __init__(self, name: str, instead: str) -> None:
        self._name, self._instead = name, instead

    def __get__(self, model: Any, owner: type) -> Any:
        raise AbsentAttributeError(f"A {owner.__name__} of unidle has no `{self._name}`; {self._instead}.")


def explain_absent(owner: Class) -> Class:
    """A class decorator: reading an attribute that `owner` does not have says what to do instead."""
    for name, instead in _ABSENT.items():
        setattr(owner, name, _AbsentAttribute(name, instead))
    return owner
