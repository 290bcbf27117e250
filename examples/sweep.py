"""A search for settings: six trials, three at a time in one process; Optuna chooses. Needs `unidle[sweep]`."""

import unidle

if __name__ == "__main__":
    sweep = unidle.sweep(
        "CartPole-v1",
        space={
            "learning_rate": {"low": 1e-4, "high": 1e-2, "log": True},
            "net_arch": [[32], [64, 64]],
            "n_epochs": [4, 10],
        },
        trials=6,
        at_once=3,
        n_envs=8,
        n_steps=64,
        timesteps=6_000,
    )
    print(f"best {sweep.best}")
    print(f"{sweep.path}/report.html compares the trials; {sweep.path}/best.yaml is for `unidle train --config`")
