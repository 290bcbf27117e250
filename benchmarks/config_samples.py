"""Config files as users have them, in every format that unidle reads, and an engine file."""

from __future__ import annotations

CONFIGS = {
    "unidle": """
recipe:
  n_envs: 8
  n_steps: 128
  batch_size: 64
  net_arch: [64, 64]
  learning_rate: 3e-4
  gamma: 0.99
  target_kl: null
engine:
  workers: 2
  threads: 1
run:
  env: CartPole-v1
  timesteps: 5000
  seed: 3
  eval_every: 1000
""",
    "rl-zoo": """
CartPole-v1: &default
  n_envs: 8
  n_timesteps: !!float 1e5
  policy: 'MlpPolicy'
  n_steps: 32
  batch_size: 256
  gae_lambda: 0.8
  gamma: 0.98
  n_epochs: 20
  ent_coef: 0.0
  learning_rate: lin_0.001
  clip_range: lin_0.2
  normalize: "dict(norm_obs=True, norm_reward=False)"
  policy_kwargs: "dict(log_std_init=-2, ortho_init=False, activation_fn=nn.ReLU, net_arch=[32, 32])"
Pendulum-v1:
  <<: *default
  n_envs: 4
""",
    "Isaac Lab": """
seed: 42
n_timesteps: !!float 1e6
policy: 'MlpPolicy'
n_steps: 32
batch_size: 8192
gae_lambda: 0.95
gamma: 0.99
n_epochs: 4
ent_coef: 0.01
learning_rate: !!float 3e-4
clip_range: !!float 0.2
policy_kwargs:
  activation_fn: nn.ELU
  net_arch: [32, 32]
  squash_output: False
vf_coef: 1.0
max_grad_norm: 1.0
device: "cuda:0"
""",
    "ElegantRL": """
net_dims: [64, 32]
learning_rate: 1e-4
gamma: 0.98
num_envs: 4
batch_size: 64
repeat_times: 8
horizon_len: 512
break_step: 200000
""",
}
ENGINE = "engine:\n  workers: 2\n  slices: 2\n  pin_cores: true\n  threads: 1\nmachine:\n  cores: 2\n  gpu: null\n"
