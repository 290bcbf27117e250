"""ElegantRL's names for settings."""

from __future__ import annotations

RENAMED = {
    "num_envs": "n_envs",
    "horizon_len": "n_steps",
    "repeat_times": "n_epochs",
    "worker_num": "workers",
    "net_dims": "net_arch",
    "ratio_clip": "clip_range",
    "lambda_gae_adv": "gae_lambda",
    "lambda_entropy": "ent_coef",
    "clip_grad_norm": "max_grad_norm",
    "break_step": "timesteps",
    "random_seed": "seed",
}

# Names that identify such a file; `num_envs` is too common.
MARKS = {*RENAMED, "target_step"} - {"num_envs"}
