"""PPO, SAC, TD3 and DQN with Stable-Baselines3's arguments and defaults.

`settings`, the last argument, is unidle's own: settings of `unidle.train` such as dict(workers=4), which override the
other arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from unidle.sb3.fixed_argument import FixedArgument
from unidle.sb3.model import Model

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


class SAC(Model):
    """Soft actor-critic."""

    algo = "sac"
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


class TD3(Model):
    """Twin delayed DDPG."""

    algo = "td3"
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


class DQN(Model):
    """Deep Q-learning."""

    algo = "dqn"
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
