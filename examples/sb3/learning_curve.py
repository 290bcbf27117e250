"""Write the episodes to a file while training, and plot them."""

import gymnasium
import numpy as np
from matplotlib import pyplot

from unidle.sb3 import PPO
from unidle.sb3.common.monitor import Monitor, load_results
from unidle.sb3.common.results_plotter import ts2xy

env = Monitor(gymnasium.make("CartPole-v1"), "monitor")
model = PPO("MlpPolicy", env, n_steps=128, n_epochs=4, seed=1)
model.learn(total_timesteps=40_000)

steps, returns = ts2xy(load_results("."), "timesteps")
window = min(10, len(returns))
pyplot.plot(steps[window - 1 :], np.convolve(returns, np.ones(window) / window, "valid"))
pyplot.xlabel("steps")
pyplot.ylabel(f"return, mean of {window} episodes")
pyplot.savefig("learning_curve.png")
