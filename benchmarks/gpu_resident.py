"""Environments on the GPU: unidle against a PureJaxRL-style PPO and RSL-RL, same work, one run, one machine.

    python benchmarks/gpu_resident.py [--n-envs 4096 32768] [--seconds 3] [--sides unidle unidle-bf16 jax rsl-rl]

CartPole, 32 steps, 4 epochs of 4 minibatches, separate actor and critic of 64,64 tanh; RSL-RL at its own settings (24
steps, 5 epochs of 4), with a captured environment and without checks for NaN. Matrix products use TF32, except on the
side named bf16. JAX is measured with both of its generators of random numbers, jax (threefry) and jax-rbg; the faster
one counts. The sides alternate, forwards and then backwards, each in a separate process, but bf16 is measured once;
compiling and capturing are not counted. Further tables show the parts of one of unidle's iterations, each with a lower
bound from its arithmetic and memory traffic; the share of time between two replays; and the time until at least 100
training episodes average 475.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from machine import RESULTS, WARM_UP_S, provenance, save

STEPS, EPOCHS, MINIBATCHES, UNITS = 32, 4, 4, 64
SIDES = ("unidle", "unidle-bf16", "jax", "jax-rbg", "rsl-rl")
ONCE = ("unidle-bf16",)
# Peak rates of an H200, dense, at its boost clock.
_TF32_FLOPS, _BYTES_PER_SECOND = 495e12, 4.8e12
_REPLAYS_PER_TIMING = 10  # replays timed together


def settings(n_envs: int) -> dict[str, Any]:
    """The recipe for unidle.train."""
    return {
        "preset": "classic",
        "n_envs": n_envs,
        "n_steps": STEPS,
        "batch_size": n_envs * STEPS // MINIBATCHES,
        "n_epochs": EPOCHS,
        "net_arch": (UNITS, UNITS),
        "activation": "tanh",
        "learning_rate": 2.5e-4,
        "ent_coef": 0.01,
        "tensorboard": False,
        "quiet": True,
    }


def measure_unidle(n_envs: int, seconds: float, precision: str) -> dict[str, Any]:
    """Train unidle; steps per second are measured after warm-up."""
    import unidle

    call_times: list[float] = []
    marks: list[tuple[float, int]] = []
    last: dict[str, Any] = {}

    def watch(context: unidle.CallbackContext) -> None:
        call_times.append(time.perf_counter())
        if call_times[-1] - call_times[0] >= WARM_UP_S:
            marks.append((call_times[-1], context.record["step"]))
        last.update(context.record)
        if len(marks) > 2 and marks[-1][0] - marks[0][0] >= seconds:
            context.stop()

    with tempfile.TemporaryDirectory() as folder:
        unidle.train(
            "unidle/CartPole-v1",
            timesteps=10**11,
            eval_every=0,
            checkpoint_every=10**11,
            runs_dir=folder,
            after_iteration=[watch],
            precision=precision,
            **settings(n_envs),
        )
    (began, first), (ended, steps) = marks[0], marks[-1]
    rate = (steps - first) / (ended - began)
    return {"steps_per_second": rate, "iterations": last["iteration"], "mean_length": last["rollout/length_mean"]}


def measure_rsl_rl(n_envs: int, seconds: float) -> dict[str, Any]:
    """Train with RSL-RL's runner on the same physics."""
    from rsl_rl_cartpole import train

    return train(n_envs, seconds)


def parts(n_envs: int) -> dict[str, dict[str, float]]:
    """Return the milliseconds of each part of an iteration, captured separately, and a lower bound."""
    import torch

    from unidle.algos.ppo_ops import new_ppo
    from unidle.buffers.rollout import Rollout
    from unidle.config import PPORecipe
    from unidle.engine.collect.device import DeviceCollector
    from unidle.engine.cuda_graphs import Capture
    from unidle.engine.learn.device_loop import DeviceLoop
    from unidle.envs.make import env_maker
    from unidle.envs.probe import probe
    from unidle.nn.actor_critic import ActorCritic
    from unidle.timeline import Timeline

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    fields = PPORecipe.__dataclass_fields__
    recipe = PPORecipe(**{name: value for name, value in settings(n_envs).items() if name in fields})
    maker = env_maker("unidle/CartPole-v1")
    env_spec = probe(maker)
    policy = ActorCritic(env_spec.obs_layout, env_spec.action_layout, recipe).to(device)
    algo = new_ppo(policy, recipe)
    rollout = Rollout(STEPS, n_envs, env_spec.obs_layout.obs_bytes, env_spec.action_layout.width, 0, device)
    collector = DeviceCollector(maker.device_env(n_envs, 0, device), env_spec, policy, rollout, 0, Timeline())
    capture = Capture(device, print)
    loop = DeviceLoop(collector, algo, 0, Timeline(), capture)
    times_ms = {"iteration": _milliseconds(loop._iterate, device)}  # first: this selects the kernels
    noise, shuffle = torch.Generator(device), torch.Generator(device)
    changes = [*collector.carried_state(), algo.parameters.flat, *algo.optimiser.state_dict().values()]

    def collect() -> None:
        collector.collect(noise)

    def prepare() -> None:
        algo.prepare(rollout)

    def shuffle_all() -> None:
        for _ in range(EPOCHS):
            algo.ops.shuffle(n_envs * STEPS, shuffle)

    for name, function in (("rollout", collect), ("values and advantages", prepare), ("shuffles", shuffle_all)):
        times_ms[name] = _milliseconds(capture(name, function, changes, generators=(noise, shuffle)), device)
    times_ms["learning"] = 2 * times_ms["iteration"] - sum(times_ms.values())
    return {name: {"ms": ms, "least_ms": _lower_bound_ms(name, n_envs)} for name, ms in times_ms.items()}


def _milliseconds(function: Callable[[], None], device: Any) -> float:
    import torch

    for _ in range(3):
        function()
    if device.type != "cuda":
        began = time.perf_counter()
        function()
        return (time.perf_counter() - began) * 1e3
    times = []
    for _ in range(10):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(10**7)  # so that all replays are launched before the first one starts
        start.record()
        for _ in range(_REPLAYS_PER_TIMING):
            function()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / _REPLAYS_PER_TIMING)
    return float(np.median(times))


def _lower_bound_ms(name: str, n_envs: int) -> float:
    """Milliseconds for the arithmetic or the memory traffic, whichever is longer."""
    if name == "iteration":
        parts = ("rollout", "values and advantages", "shuffles", "learning")
        return sum(_lower_bound_ms(part, n_envs) for part in parts)
    samples = n_envs * STEPS
    network = 2 * (4 * UNITS + UNITS * UNITS)  # floating-point operations of the hidden layers, for one sample
    flops = {
        "rollout": samples * (network + 4 * UNITS),
        "values and advantages": samples * 2 * network,
        "learning": 3 * EPOCHS * samples * 2 * network,
    }
    # Each step reads and writes the state, and stores an observation, an action, a reward and two flags.
    per_sample = {
        "rollout": 2 * 32 + 26,
        "values and advantages": 60,
        "shuffles": 2 * 8 * EPOCHS,
        "learning": 48 * EPOCHS,
    }
    return 1e3 * max(flops.get(name, 0) / _TF32_FLOPS, samples * per_sample[name] / _BYTES_PER_SECOND)


def solve(n_envs: int, seed: int) -> dict[str, float]:
    """Return the seconds until at least 100 episodes that ended since the previous record average 475.

    The policy is then evaluated over 100 episodes. The clock starts at the first record.
    """
    import unidle

    walls: list[float] = []
    episodes: list[int] = []

    def watch(context: unidle.CallbackContext) -> None:
        record = context.record
        walls.append(record["wall"])
        episodes.append(record["rollout/episodes"])
        ended = episodes[-1] - episodes[-2] if len(episodes) > 1 else 0
        if ended >= 100 and record["rollout/return_mean"] >= 475:
            context.stop()

    with tempfile.TemporaryDirectory() as folder:
        run = unidle.train(
            "unidle/CartPole-v1",
            seed=seed,
            timesteps=2000 * n_envs * STEPS,
            eval_every=0,
            eval_episodes=100,
            runs_dir=folder,
            after_iteration=[watch],
            **{**settings(n_envs), "learning_rate": 1e-3},
        )
        steps = run.records[-1]["step"]
        evaluated = run.evaluate(episodes=100).mean_return
    return {"seconds": walls[-1] - walls[0], "steps": steps, "evaluated": evaluated}


def main() -> None:
    """Measure all sides and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n-envs", type=int, nargs="+", default=[4096, 32768])
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement, after warm-up")
    parser.add_argument("--sides", nargs="+", default=list(SIDES), choices=SIDES)
    parser.add_argument("--seeds", type=int, default=3, help="for the time to 475")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)  # internal: side and number of environments
    arguments = parser.parse_args()
    if arguments.one:
        side, n_envs = arguments.one[0], int(arguments.one[1])
        measure: dict[str, Callable[[], Any]] = {
            "unidle": lambda: measure_unidle(n_envs, arguments.seconds, "tf32"),
            "unidle-bf16": lambda: measure_unidle(n_envs, arguments.seconds, "bf16"),
            "rsl-rl": lambda: measure_rsl_rl(n_envs, arguments.seconds),
            "parts": lambda: parts(n_envs),
            "solve": lambda: [solve(n_envs, seed) for seed in range(1, arguments.seeds + 1)],
        }
        print(json.dumps(measure[side]()))
        return
    result: dict[str, Any] = {"machine": provenance(), "n_envs": {}}
    for n_envs in arguments.n_envs:
        row: dict[str, Any] = {side: [] for side in arguments.sides}
        result["n_envs"][str(n_envs)] = row
        again = [side for side in reversed(arguments.sides) if side not in ONCE]
        for side in [*arguments.sides, *again]:
            row[side].append(_run_in_subprocess(side, n_envs, arguments))
            save("gpu_resident", result, arguments.out)
            print(f"{n_envs:,} {side}: {row[side][-1]}", file=sys.stderr, flush=True)
        row["parts"] = _run_in_subprocess("parts", n_envs, arguments)
        save("gpu_resident", result, arguments.out)
    result["solved"] = _run_in_subprocess("solve", arguments.n_envs[0], arguments)
    save("gpu_resident", result, arguments.out)
    _print_tables(result, arguments.sides)


def gap_share(times_ms: dict[str, Any], n_envs: int, rate: float) -> float:
    """Return the share of time between the end of an iteration and the start of the next."""
    return 1 - times_ms["iteration"]["ms"] / (1e3 * n_envs * STEPS / rate)


def _run_in_subprocess(side: str, n_envs: int, arguments: argparse.Namespace) -> Any:
    if side.startswith("jax"):
        updates = str(max(20, 2**20 // n_envs))
        command = [str(Path(__file__).with_name("jax_ppo.py")), "--n-envs", str(n_envs), "--updates", updates]
        command += ["--seconds", str(arguments.seconds), "--prng", "rbg" if side == "jax-rbg" else "threefry2x32"]
    else:
        command = [
            __file__,
            "--one",
            side,
            str(n_envs),
            "--seconds",
            str(arguments.seconds),
            "--seeds",
            str(arguments.seeds),
        ]
    # A second run of the same program on JAX's side need not compile it again.
    environ = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(Path(tempfile.gettempdir()) / "jax-cache")}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environ)
    if done.returncode:
        raise SystemExit(f"{side} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def _print_tables(result: dict[str, Any], sides: list[str]) -> None:
    for n_envs, row in result["n_envs"].items():
        rates = {side: float(np.median([run["steps_per_second"] for run in row[side]])) for side in sides}
        print(f"{int(n_envs):,} environments")
        for side, rate in rates.items():
            env = [run["environment_share"] for run in row[side] if "environment_share" in run]
            note = f"; its environment takes {np.median(env):.0%} of the time" if env else ""
            times = rates["unidle"] / rate
            print(f"  {side:<24}{rate / 1e6:10.2f} M steps/s   unidle is {times:.2f} times as fast{note}")
        for name, part in row["parts"].items():
            print(f"  {name:<24}{part['ms']:10.3f} ms          at least {part['least_ms']:.3f}")
        print(f"  gap between replays     {100 * gap_share(row['parts'], int(n_envs), rates['unidle']):10.1f} %")
    for solved in result["solved"]:
        print(
            f"475 after {solved['seconds']:.2f} s and {solved['steps']:,} steps; evaluation {solved['evaluated']:.0f}"
        )


if __name__ == "__main__":
    main()
