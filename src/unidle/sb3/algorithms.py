"""PPO, SAC, TD3 and DQN with Stable-Baselines3's arguments and defaults.

`settings`, the last argument, is unidle's own: settings of `unidle.train` such as dict(workers=4), which override the
other arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from unidle.sb3.fixed_argument import FixedArgument
from unidle.sb3.model import Model
from unidle.sb3.off_policy_model import OffPolicyModel
from unidle.sb3.policy_part import PolicyPart

Scheduled = float | Callable[[float], float]  # a number, or a function of the part of training that remains, 1 to 0


class PPO(Model):
    """Proximal policy optimisation."""

    algo = "ppo"
    n_steps = FixedArgument()
    n_epochs = FixedArgument()
    gae_lambda = FixedArgument()
    clip_range = FixedArgument()
    clip_range_vf = FixedArgument()
    normalize_advantage = FixedArgument()
    ent_coef = FixedArgument()
    vf_coef = FixedArgument()
    max_grad_norm = FixedArgument()
    use_sde = FixedArgument()
    sde_sample_freq = FixedArgument()
    target_kl = FixedArgument()

    def __init__(
        self,
        policy: str,
        env: Any,
        learning_rate: Scheduled = 3e-4,
        n_steps: int = 2048,
        batch_size: int = 64,
        n_epochs: int = 10,
        gamma: float = 0.99,
        gae_lambda: float = 0.95,
        clip_range: Scheduled = 0.2,
        clip_range_vf: float | None = None,
        normalize_advantage: bool = True,
        ent_coef: float = 0.0,
        vf_coef: float = 0.5,
        max_grad_norm: float = 0.5,
        use_sde: bool = False,
        sde_sample_freq: int = -1,
        rollout_buffer_class: Any = None,
        rollout_buffer_kwargs: dict[str, Any] | None = None,
        target_kl: float | None = None,
        stats_window_size: int = 100,
        tensorboard_log: str | None = None,
        policy_kwargs: dict[str, Any] | None = None,
        verbose: int = 0,
        seed: int | None = None,
        device: Any = "auto",
        _init_setup_model: bool = True,
        *,
        settings: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(locals())


class SAC(OffPolicyModel):
    """Soft actor-critic."""

    algo = "sac"
    actor = PolicyPart()
    critic = PolicyPart()
    critic_target = PolicyPart()
    buffer_size = FixedArgument()
    learning_starts = FixedArgument()
    tau = FixedArgument()
    n_steps = FixedArgument("n_step")
    train_freq = FixedArgument("n_steps")
    gradient_steps = FixedArgument(lambda recipe: round(recipe.updates_per_iteration))
    ent_coef = FixedArgument()
    target_entropy = FixedArgument()
    use_sde = FixedArgument()
    sde_sample_freq = FixedArgument()

    def __init__(
        self,
        policy: str,
        env: Any,
        learning_rate: Scheduled = 3e-4,
        buffer_size: int = 1_000_000,
        learning_starts: int = 100,
        batch_size: int = 256,
        tau: float = 0.005,
        gamma: float = 0.99,
        train_freq: int | tuple[int, str] = 1,
        gradient_steps: int = 1,
        action_noise: Any = None,
        replay_buffer_class: Any = None,
        replay_buffer_kwargs: dict[str, Any] | None = None,
        optimize_memory_usage: bool = False,
        n_steps: int = 1,
        ent_coef: str | float = "auto",
        target_update_interval: int = 1,
        target_entropy: str | float = "auto",
        use_sde: bool = False,
        sde_sample_freq: int = -1,
        use_sde_at_warmup: bool = False,
        stats_window_size: int = 100,
        tensorboard_log: str | None = None,
        policy_kwargs: dict[str, Any] | None = None,
        verbose: int = 0,
        seed: int | None = None,
        device: Any = "auto",
        _init_setup_model: bool = True,
        *,
        settings: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(locals())

    @property
    def log_ent_coef(self) -> torch.Tensor | None:
        """The logarithm of the learned temperature; None if `ent_coef` is a number."""
        return self._log_temperature() if self.ent_coef == "auto" else None

    @property
    def ent_coef_tensor(self) -> torch.Tensor:
        """The temperature."""
        return self._log_temperature().exp()

    def _log_temperature(self) -> torch.Tensor:
        found: torch.Tensor = self._state()["algo"]["log_temperature"]
        return found.detach().clone().view(1)


class TD3(OffPolicyModel):
    """Twin delayed DDPG."""

    algo = "td3"
    actor = PolicyPart()
    actor_target = PolicyPart()
    critic = PolicyPart()
    critic_target = PolicyPart()
    buffer_size = FixedArgument()
    learning_starts = FixedArgument()
    tau = FixedArgument()
    n_steps = FixedArgument("n_step")
    train_freq = FixedArgument("n_steps")
    gradient_steps = FixedArgument(lambda recipe: round(recipe.updates_per_iteration))
    policy_delay = FixedArgument()
    target_policy_noise = FixedArgument()
    target_noise_clip = FixedArgument()

    def __init__(
        self,
        policy: str,
        env: Any,
        learning_rate: Scheduled = 1e-3,
        buffer_size: int = 1_000_000,
        learning_starts: int = 100,
        batch_size: int = 256,
        tau: float = 0.005,
        gamma: float = 0.99,
        train_freq: int | tuple[int, str] = 1,
        gradient_steps: int = 1,
        action_noise: Any = None,
        replay_buffer_class: Any = None,
        replay_buffer_kwargs: dict[str, Any] | None = None,
        optimize_memory_usage: bool = False,
        n_steps: int = 1,
        policy_delay: int = 2,
        target_policy_noise: float = 0.2,
        target_noise_clip: float = 0.5,
        stats_window_size: int = 100,
        tensorboard_log: str | None = None,
        policy_kwargs: dict[str, Any] | None = None,
        verbose: int = 0,
        seed: int | None = None,
        device: Any = "auto",
        _init_setup_model: bool = True,
        *,
        settings: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(locals())


class DQN(OffPolicyModel):
    """Deep Q-learning."""

    algo = "dqn"
    q_net = PolicyPart()
    q_net_target = PolicyPart()
    buffer_size = FixedArgument()
    learning_starts = FixedArgument()
    tau = FixedArgument()
    n_steps = FixedArgument("n_step")
    train_freq = FixedArgument("n_steps")
    gradient_steps = FixedArgument(lambda recipe: round(recipe.updates_per_iteration))
    exploration_fraction = FixedArgument()
    exploration_final_eps = FixedArgument()
    max_grad_norm = FixedArgument()
    target_update_interval = FixedArgument(lambda recipe: round(recipe.target_update_interval / recipe.utd_ratio))

    def __init__(
        self,
        policy: str,
        env: Any,
        learning_rate: Scheduled = 1e-4,
        buffer_size: int = 1_000_000,
        learning_starts: int = 100,
        batch_size: int = 32,
        tau: float = 1.0,
        gamma: float = 0.99,
        train_freq: int | tuple[int, str] = 4,
        gradient_steps: int = 1,
        replay_buffer_class: Any = None,
        replay_buffer_kwargs: dict[str, Any] | None = None,
        optimize_memory_usage: bool = False,
        n_steps: int = 1,
        target_update_interval: int = 10_000,
        exploration_fraction: float = 0.1,
        exploration_initial_eps: float = 1.0,
        exploration_final_eps: float = 0.05,
        max_grad_norm: float = 10,
        stats_window_size: int = 100,
        tensorboard_log: str | None = None,
        policy_kwargs: dict[str, Any] | None = None,
        verbose: int = 0,
        seed: int | None = None,
        device: Any = "auto",
        _init_setup_model: bool = True,
        *,
        settings: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(locals())

    @property
    def exploration_rate(self) -> float:
        """The share of random actions, in training and in `predict` that is not deterministic."""
        return float(self._state()["algo"]["policy"]["distribution.epsilon"])

    @exploration_rate.setter
    def exploration_rate(self, value: float) -> None:
        self._state()["algo"]["policy"]["distribution.epsilon"].fill_(float(value))
        self._agent = None
