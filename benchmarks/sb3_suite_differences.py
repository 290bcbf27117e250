"""Why tests of Stable-Baselines3 fail on unidle.sb3 on purpose: a part of a test's name → the reason."""

DIFFERENCES: dict[str, str] = {}
