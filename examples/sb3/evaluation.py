"""Evaluate while training, keep the best model and checkpoints, and stop when the task is solved."""

from unidle.sb3 import DQN
from unidle.sb3.common.callbacks import CheckpointCallback, EvalCallback, StopTrainingOnRewardThreshold
from unidle.sb3.common.env_util import make_vec_env

solved = StopTrainingOnRewardThreshold(reward_threshold=475, verbose=1)
evaluation = EvalCallback(
    make_vec_env("CartPole-v1", n_envs=2),
    callback_on_new_best=solved,
    n_eval_episodes=4,
    eval_freq=200,
    log_path="logs",
    best_model_save_path="logs",
)
checkpoints = CheckpointCallback(save_freq=250, save_path="logs", name_prefix="dqn")
model = DQN("MlpPolicy", "CartPole-v1", learning_rate=1e-3, learning_starts=100, seed=1)
model.learn(total_timesteps=50_000, callback=[evaluation, checkpoints])
best = DQN.load("logs/best_model")
print(f"best return {evaluation.best_mean_reward:.0f} after {evaluation.evaluations_timesteps[-1]} steps")
