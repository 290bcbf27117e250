"""A learning rate and a clip range that fall during training, and other networks."""

from torch import nn

from unidle.sb3 import PPO


def linear(start):
    """The value for the part of training that remains, from 1 to 0."""
    return lambda remaining: start * remaining


model = PPO(
    "MlpPolicy",
    "CartPole-v1",
    learning_rate=linear(1e-3),
    clip_range=linear(0.2),
    n_steps=128,
    policy_kwargs={"activation_fn": nn.ReLU, "net_arch": {"pi": [32], "vf": [64, 64]}, "ortho_init": False},
    seed=1,
)
model.learn(total_timesteps=30_000)
model.learn(total_timesteps=30_000, reset_num_timesteps=False)
print(f"{model.num_timesteps} steps")
