"""How fast is an update of SAC? Against Stable-Baselines3's `train()` alone, on a full buffer, in one run.

    python benchmarks/off_policy.py [--batch-sizes 512 1280] [--seconds 3]

Meta-World's sizes: observations of size 49, actions of size 4, an actor of 256,256 and two critics of 1024,1024,1024
(ReLU), matrix products in TF32 on both sides. The sides alternate, A B B A, each in a separate process. The output also
shows a lower bound on the time of an update from its arithmetic and the memory traffic of its parameters.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from machine import RESULTS, provenance, save

OBS_SIZE, ACTION_SIZE, ACTOR, CRITIC = 49, 4, (256, 256), (1024, 1024, 1024)
BUFFER_SIZE = 100_000  # transitions
_TF32_FLOPS, _BYTES_PER_SECOND = 495e12, 4.8e12  # peak rates of an H200, dense


def measure_unidle(batch_size: int, seconds: float, actor: tuple[int, ...], critic: tuple[int, ...]) -> float:
    """Return updates per second; on a GPU, CUDA graphs run eight at a time."""
    import torch
    from gymnasium import spaces

    from unidle.algos.registry import new_algorithm
    from unidle.config import SACRecipe
    from unidle.engine.cuda_graphs import Capture
    from unidle.nn.sac_policy import SACPolicy
    from unidle.spaces.actions import ActionLayout
    from unidle.spaces.observations import ObservationLayout

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    obs_layout = ObservationLayout.of(spaces.Box(-np.inf, np.inf, (OBS_SIZE,)))
    recipe = SACRecipe(
        n_envs=100,
        n_steps=1,
        batch_size=batch_size,
        net_arch=actor,
        critic_arch=critic,
        activation="relu",
        max_grad_norm=float("inf"),
        buffer_size=BUFFER_SIZE + 1000,
    )
    policy = SACPolicy(obs_layout, ActionLayout.of(spaces.Box(-1, 1, (ACTION_SIZE,))), recipe).to(device)
    capture = Capture(device, print)
    algo: Any = new_algorithm(policy, recipe, capture, capture.fall_back)

    def random_obs() -> Any:
        noise = torch.randn(100, obs_layout.obs_bytes // 4, device=device)
        return noise.view(torch.uint8)

    buffer: Any = algo.experience.sampler
    not_ended = torch.zeros(100, dtype=torch.bool, device=device)
    buffer.start(random_obs())
    for _ in range(BUFFER_SIZE // 100):
        obs = random_obs()
        actions = torch.rand(100, ACTION_SIZE, device=device) * 2 - 1
        buffer.add(actions, torch.randn(100, device=device), not_ended, not_ended, obs, obs)
    updates = algo._updates
    updates.begin(torch.Generator(device).manual_seed(1))

    def rate(seconds: float) -> float:
        began, count = time.perf_counter(), 0
        while time.perf_counter() - began < seconds:
            for _ in range(4):
                count += updates.run(1000)
            if device.type == "cuda":
                torch.cuda.synchronize()
        return count / (time.perf_counter() - began)

    rate(min(1.0, seconds))
    return rate(seconds)


def measure_sb3(batch_size: int, seconds: float, actor: tuple[int, ...], critic: tuple[int, ...]) -> float:
    """Return updates per second of `SAC.train`."""
    import gymnasium
    import torch
    from gymnasium import spaces
    from stable_baselines3 import SAC
    from stable_baselines3.common.logger import configure

    class DummyEnv(gymnasium.Env):
        observation_space = spaces.Box(-np.inf, np.inf, (OBS_SIZE,), np.float32)
        action_space = spaces.Box(-1, 1, (ACTION_SIZE,), np.float32)

    torch.set_float32_matmul_precision("high")
    torch.set_num_threads(1)
    layers = {"pi": list(actor), "qf": list(critic)}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = SAC("MlpPolicy", DummyEnv(), policy_kwargs={"net_arch": layers}, buffer_size=BUFFER_SIZE, device=device)
    model.set_logger(configure(None, []))
    buffer, rng = model.replay_buffer, np.random.default_rng(0)
    assert buffer is not None
    buffer.observations[:] = rng.normal(size=buffer.observations.shape)
    buffer.next_observations[:] = rng.normal(size=buffer.next_observations.shape)
    buffer.actions[:] = rng.uniform(-1, 1, buffer.actions.shape)
    buffer.rewards[:] = rng.normal(size=buffer.rewards.shape)
    buffer.full = True

    def rate(seconds: float) -> float:
        began, count = time.perf_counter(), 0
        while time.perf_counter() - began < seconds:
            model.train(gradient_steps=4, batch_size=batch_size)
            count += 4
        if device == "cuda":
            torch.cuda.synchronize()
        return count / (time.perf_counter() - began)

    rate(min(1.0, seconds))
    return rate(seconds)


def lower_bound_seconds(batch_size: int, actor: tuple[int, ...], critic: tuple[int, ...]) -> float:
    """Return the lower bound of an update: matrix products at peak rate or memory traffic of the parameters."""

    def size(inputs: int, layers: tuple[int, ...], outputs: int) -> int:
        widths = (inputs, *layers, outputs)
        return sum(a * b for a, b in itertools.pairwise(widths))

    actor_size, critic_size = size(OBS_SIZE, actor, 2 * ACTION_SIZE), size(OBS_SIZE + ACTION_SIZE, critic, 1)
    # Passes: actor on s' and on s, with backward (2); both critics on (s, a) with backward, their targets on s', and
    # both on (s, a ~ π) with backward to the action only (1, without weight gradients).
    products = actor_size * (1 + 3) + 2 * critic_size * (3 + 1 + 2)
    # Adam reads and writes parameter, mean and square and reads the gradient; the target is read and written.
    traffic = 4 * (7 * (actor_size + 2 * critic_size) + 3 * 2 * critic_size)
    return max(2 * batch_size * products / _TF32_FLOPS, traffic / _BYTES_PER_SECOND)


def main() -> None:
    """Measure both sides in turn and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[512, 1280])
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--actor", type=int, nargs="+", default=list(ACTOR))
    parser.add_argument("--critic", type=int, nargs="+", default=list(CRITIC))
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON")
    # Internal: run one measurement in this process.
    parser.add_argument("--side", choices=["unidle", "sb3"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    actor, critic = tuple(arguments.actor), tuple(arguments.critic)
    if arguments.side:
        measure = measure_unidle if arguments.side == "unidle" else measure_sb3
        print(measure(arguments.batch_sizes[0], arguments.seconds, actor, critic))
        return
    result: dict[str, Any] = {"machine": provenance("stable-baselines3"), "actor": actor, "critic": critic}
    result["batch_sizes"] = {}
    for batch_size in arguments.batch_sizes:
        row: dict[str, Any] = {"sb3": [], "unidle": []}
        for side in ("sb3", "unidle", "unidle", "sb3"):
            row[side].append(_run_in_subprocess(side, batch_size, arguments))
            print(f"{batch_size} {side}: {row[side][-1]:,.0f} updates/s", file=sys.stderr, flush=True)
        row["least_seconds"] = lower_bound_seconds(batch_size, actor, critic)
        row["ratio"] = float(np.mean(row["unidle"]) / np.mean(row["sb3"]))
        result["batch_sizes"][str(batch_size)] = row
        save("off_policy", result, arguments.out)
    for batch, row in result["batch_sizes"].items():
        ours, theirs = np.mean(row["unidle"]), np.mean(row["sb3"])
        print(
            f"batch {batch}: {ours:,.0f} updates/s against {theirs:,.0f}: {row['ratio']:.1f} times as many; "
            f"{1e3 / ours:.3f} ms each, at least {1e3 * row['least_seconds']:.3f} ms"
        )


def _run_in_subprocess(side: str, batch_size: int, arguments: argparse.Namespace) -> float:
    sizes = [str(batch_size)], [str(arguments.seconds)], map(str, arguments.actor), map(str, arguments.critic)
    names = ("--batch-sizes", "--seconds", "--actor", "--critic")
    flags = [flag for name, values in zip(names, sizes) for flag in (name, *values)]
    done = subprocess.run([sys.executable, __file__, "--side", side, *flags], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{side} failed:\n{done.stderr}")
    return float(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
