"""Vector environments: those of Gymnasium, Stable-Baselines3 and EnvPool, and unidle's own for other trainers."""
