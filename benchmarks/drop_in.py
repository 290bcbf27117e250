"""The same script with `stable_baselines3` and with `unidle.sb3`: only the import differs.

    python benchmarks/drop_in.py speed [--device cpu] [--rounds 2] [--tasks …]
    python benchmarks/drop_in.py cpu [--rounds 1] [--tasks …]
    python benchmarks/drop_in.py learning [--device cpu] [--seeds 5] [--jobs 1] [--tasks …]

Speed: steps per second of `learn` after a first, short one. Stable-Baselines3 runs with torch's default number of
threads and with one, which is faster for small networks; the ratio is to the faster. The sides alternate, forwards and
then backwards; the result is the median. Use an otherwise idle machine.

CPU: CPU time with Stable-Baselines3's default settings and one thread on each side, which other work on the machine
affects little: of `learn` after a first, short one, and of a whole process that imports, creates a model and learns
1,000 steps. The sides alternate in the same way.

Learning: the returns of the final policies over seeds, by the rule of `learning.py`. Runs that are already in the JSON
for the same script are not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import gymnasium
from machine import RESULTS, provenance, save
from side_by_side import compare, print_table, random_policy

HERE = Path(__file__).parent

# Run as it is by either library; `result` is what is measured.
SCRIPT = """
from {library} import {algo}
from {library}.common.env_util import make_vec_env
from {library}.common.vec_env import {vec_env}

if __name__ == "__main__":
    vec_env = make_vec_env("{env}", n_envs={n_envs}, seed={seed}, vec_env_cls={vec_env})
    model = {algo}("MlpPolicy", vec_env, seed={seed}, device="{device}", {arguments})
"""
SPEED = (
    SCRIPT
    + """
    import time

    model.learn(total_timesteps={warm_up})
    began = time.perf_counter()
    model.learn(total_timesteps={steps}, reset_num_timesteps=False)
    result = {steps} / (time.perf_counter() - began)
"""
)
LEARNING = (
    SCRIPT
    + """
    import gymnasium
    from side_by_side import evaluate

    model.learn(total_timesteps={steps})
    result = evaluate(gymnasium.make("{env}"), lambda observation: model.predict(observation, deterministic=True)[0])
"""
)
# With the default arguments, and the processor time of the process and its children.
CPU_TIME = """
    import resource

    def cpu_seconds():
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(each.ru_utime + each.ru_stime for each in used)
"""
CPU = (
    SCRIPT
    + CPU_TIME
    + """
    model.learn(total_timesteps={warm_up})
    began = cpu_seconds()
    model.learn(total_timesteps={steps}, reset_num_timesteps=False)
    result = cpu_seconds() - began
"""
)
START = (
    SCRIPT
    + CPU_TIME
    + """
    model.learn(total_timesteps=1_000)
    result = cpu_seconds()
"""
)
ENDING = """
    import json

    print("RESULT", json.dumps(result), flush=True)
"""


@dataclass(frozen=True)
class Task:
    """What the script trains on; `arguments` are those of the algorithm, as Python source."""

    algo: str
    env: str
    steps: int
    n_envs: int = 1
    vec_env: str = "DummyVecEnv"
    arguments: dict[str, str] = field(default_factory=dict)
    warm_up: int | None = None  # steps before what is measured; by default a tenth

    def script(self, template: str, library: str, seed: int, device: str) -> str:
        """The text for one library."""
        given = asdict(self) | {"arguments": ", ".join(f"{name}={value}" for name, value in self.arguments.items())}
        given["warm_up"] = self.warm_up or max(2_000, self.steps // 10)
        return (template + ENDING).format(**given, library=library, seed=seed, device=device)


SPEED_TASKS = {
    "PPO CartPole-v1": Task("PPO", "CartPole-v1", 100_000, 8, arguments={"n_steps": "128", "batch_size": "256"}),
    "PPO HalfCheetah-v5": Task("PPO", "HalfCheetah-v5", 60_000, 8, arguments={"n_steps": "256", "batch_size": "256"}),
    "PPO HalfCheetah-v5, processes": Task(
        "PPO", "HalfCheetah-v5", 60_000, 8, "SubprocVecEnv", {"n_steps": "256", "batch_size": "256"}
    ),
    "SAC Pendulum-v1": Task("SAC", "Pendulum-v1", 4_000),
    "DQN CartPole-v1": Task("DQN", "CartPole-v1", 20_000, arguments={"learning_starts": "1000"}),
}
CPU_TASKS = {
    "PPO defaults": Task("PPO", "CartPole-v1", 5 * 2048, warm_up=2048),
    "SAC defaults": Task("SAC", "Pendulum-v1", 600, warm_up=300),
    "TD3 defaults": Task("TD3", "Pendulum-v1", 600, warm_up=300),
    "DQN defaults": Task("DQN", "CartPole-v1", 4_000, warm_up=1_000),
}
LEARNING_TASKS = {
    "CartPole-v1 ppo": Task(
        "PPO",
        "CartPole-v1",
        60_000,
        8,
        arguments={
            "n_steps": "32",
            "batch_size": "256",
            "n_epochs": "20",
            "gamma": "0.98",
            "gae_lambda": "0.8",
            "learning_rate": "lambda left: 1e-3 * left",
            "clip_range": "lambda left: 0.2 * left",
        },
    ),
    "Acrobot-v1 ppo": Task(
        "PPO",
        "Acrobot-v1",
        100_000,
        8,
        arguments={"n_steps": "256", "batch_size": "128", "n_epochs": "4", "gae_lambda": "0.94"},
    ),
    "Pendulum-v1 sac": Task(
        "SAC",
        "Pendulum-v1",
        6_000,
        arguments={
            "learning_rate": "1e-3",
            "learning_starts": "1000",
            "buffer_size": "100_000",
            "policy_kwargs": "dict(net_arch=[64, 64])",
        },
    ),
}
# Side → library and threads of torch (None: its default).
SIDES: dict[str, tuple[str, int | None]] = {
    "unidle": ("unidle.sb3", None),
    "sb3": ("stable_baselines3", None),
    "sb3, 1 thread": ("stable_baselines3", 1),
}


def run_script(text: str, threads: int | None = None) -> float:
    """Run a script in a new process; what it measured."""
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE), environment.get("PYTHONPATH")]))
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    done = subprocess.run([sys.executable, "-c", text], env=environment, text=True, capture_output=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        raise RuntimeError(f"The script failed:\n{text}\n{done.stderr[-2000:]}")
    return float(json.loads(lines[-1].removeprefix("RESULT ")))


def measure_speed(task: Task, device: str, rounds: int) -> dict[str, Any]:
    """Steps per second of each side."""
    rates: dict[str, list[float]] = {side: [] for side in SIDES}
    for turn in range(2 * rounds):
        for side, (library, threads) in list(SIDES.items())[:: -1 if turn % 2 else 1]:
            rates[side].append(run_script(task.script(SPEED, library, 1 + turn, device), threads))
            print(f"  {side}: {rates[side][-1]:,.0f} steps/s", file=sys.stderr, flush=True)
    found = {side: {"steps_per_second": median(each), "all": each} for side, each in rates.items()}
    best = max(median(each) for side, each in rates.items() if side != "unidle")
    return {**found, "ratio": median(rates["unidle"]) / best}


def main_speed(flags: argparse.Namespace, result: dict[str, Any]) -> None:
    """Measure and print the ratios."""
    part = result.setdefault(f"speed {flags.device}", {})
    for name in flags.tasks or SPEED_TASKS:
        task = SPEED_TASKS[name]
        part[name] = {**asdict(task), **measure_speed(task, flags.device, flags.rounds)}
        part[name]["machine"] = provenance("stable-baselines3")
        save("drop_in", result, flags.out)
        print(f"{name}: {part[name]['ratio']:.2f} × the faster SB3")


def main_cpu(flags: argparse.Namespace, result: dict[str, Any]) -> None:
    """Measure and print the ratios of CPU time."""
    part = result.setdefault("cpu", {})
    libraries = {"unidle": "unidle.sb3", "sb3": "stable_baselines3"}
    for name in flags.tasks or CPU_TASKS:
        task = CPU_TASKS[name]
        row: dict[str, Any] = {"steps": task.steps, "machine": provenance("stable-baselines3")}
        for what, template in (("learn", CPU), ("start", START)):
            seconds: dict[str, list[float]] = {side: [] for side in libraries}
            for turn in range(2 * flags.rounds):
                for side, library in list(libraries.items())[:: -1 if turn % 2 else 1]:
                    seconds[side].append(run_script(task.script(template, library, 1 + turn, "cpu"), 1))
                    print(f"  {name}, {what}, {side}: {seconds[side][-1]:.2f} s", file=sys.stderr, flush=True)
            row[what] = {**seconds, "ratio": median(seconds["sb3"]) / median(seconds["unidle"])}
        part[name] = row
        save("drop_in", result, flags.out)
        print(f"{name}: learn {row['learn']['ratio']:.2f} ×, start {row['start']['ratio']:.2f} ×", flush=True)


def main_learning(flags: argparse.Namespace, result: dict[str, Any]) -> None:
    """Train all seeds on both sides, alternating, and print the table."""
    rows = result.setdefault("learning", {})
    libraries = {"unidle": "unidle.sb3", "sb3": "stable_baselines3"}
    for name in flags.tasks or LEARNING_TASKS:
        task = LEARNING_TASKS[name]
        settings = {**asdict(task), "device": flags.device}
        del settings["warm_up"]
        row = rows.get(name, {})
        if row.get("settings") != settings:
            row = {"settings": settings, "timesteps": task.steps, "unidle": {}, "sb3": {}}
        rows[name] = row
        with ThreadPoolExecutor(flags.jobs) as pool:
            futures = {
                pool.submit(run_script, task.script(LEARNING, library, seed, flags.device), 1): (side, str(seed))
                for seed in range(1, flags.seeds + 1)
                for side, library in libraries.items()
                if str(seed) not in row[side]
            }
            for future in as_completed(futures):
                side, seed = futures[future]
                row[side][seed] = future.result()
                print(f"{name} {side} seed {seed}: {row[side][seed]:.1f}", file=sys.stderr, flush=True)
                save("drop_in", result, flags.out)
        if futures:
            row["machine"] = provenance("stable-baselines3")  # a task without new runs keeps its own
        row |= compare(list(row["unidle"].values()), list(row["sb3"].values()), random_policy(gymnasium.make(task.env)))
        save("drop_in", result, flags.out)
    print_table({"tasks": {name: row for name, row in rows.items() if "no_worse" in row}})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["speed", "cpu", "learning"])
    parser.add_argument("--device", default="cpu", help="device of both sides: cpu or cuda")
    parser.add_argument("--tasks", nargs="+", choices=[*SPEED_TASKS, *CPU_TASKS, *LEARNING_TASKS])
    parser.add_argument("--rounds", type=int, default=2, help="speed and CPU: rounds of A B B A")
    parser.add_argument("--seeds", type=int, default=5, help="learning: seeds of each side")
    parser.add_argument("--jobs", type=int, default=1, help="learning: runs at the same time")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON")
    flags = parser.parse_args()
    earlier = flags.out / "drop_in.json"
    result: dict[str, Any] = json.loads(earlier.read_text()) if earlier.exists() else {}
    {"speed": main_speed, "cpu": main_cpu, "learning": main_learning}[flags.what](flags, result)


if __name__ == "__main__":
    main()
