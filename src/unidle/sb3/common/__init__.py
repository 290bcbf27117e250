"""The helper modules, under the names that they have in Stable-Baselines3."""
