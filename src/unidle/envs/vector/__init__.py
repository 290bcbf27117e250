"""Vector environments of Gymnasium, Stable-Baselines3 and EnvPool, and `ProcessVectorEnv` for other trainers."""
