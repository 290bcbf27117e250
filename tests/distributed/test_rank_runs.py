"""Data-parallel runs in real processes: equal weights, repeat, resume, failures."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from on_ranks import on_ranks
from processes import is_running, restore_sigint, wait_until
from resumed_runs import assert_same

from unidle.cli import train as train_module
from unidle.engine.checkpoint.checkpoint_file import load_checkpoint
from unidle.engine.checkpoint.run_folder import RunFolder, part_of

PPO = {"env": "CartPole-v1", "n_envs": 4, "n_steps": 32, "batch_size": 32, "n_epochs": 2, "net_arch": (16,)}
SETTINGS: dict[str, dict[str, Any]] = {
    "ppo": {**PPO, "normalize_obs": True, "normalize_reward": True, "target_kl": 0.003},
    "strict": {**PPO, "overlap": "strict", "workers": 1},
    "recurrent": {**PPO, "recurrent": "gru", "recurrent_size": 8, "batch_size": 64},
    "sac": {"algo": "sac", "env": "Pendulum-v1", "learning_starts": 64, "utd_ratio": 0.25},
    "td3": {"algo": "td3", "env": "Pendulum-v1", "learning_starts": 64, "utd_ratio": 0.25},
    "dqn": {"algo": "dqn", "env": "CartPole-v1", "learning_starts": 64, "utd_ratio": 0.25, "per": True},
}
for name in ("sac", "td3", "dqn"):
    SETTINGS[name] |= {"n_envs": 4, "n_steps": 8, "batch_size": 16, "net_arch": (16,), "buffer_size": 1000}


def flags(settings: dict[str, Any]) -> list[str]:
    words = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words.append(f"--{flag}={','.join(map(str, value)) if isinstance(value, tuple) else value}")
    return words


def command(*arguments: str, ranks: int = 2) -> list[str]:
    return [sys.executable, "-m", "unidle", "train", *arguments, *(["--ranks", str(ranks)] if ranks > 1 else [])]


def train(folder: Path, *arguments: str, ranks: int = 2, **settings: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments, *flags(settings), ranks=ranks), cwd=folder, capture_output=True, text=True, timeout=120
    )


def new_run(folder: Path, name: str, ranks: int = 2, **settings: Any) -> list[dict[str, Any]]:
    """The final state of each rank of a run."""
    done = train(folder, "--quiet", ranks=ranks, run_name=name, eval_every=0, seed=3, **settings)
    assert done.returncode == 0, done.stderr
    return states(folder / "runs" / name, ranks)


def states(path: Path, ranks: int = 2) -> list[dict[str, Any]]:
    latest = RunFolder.open(path).latest()
    assert latest is not None
    return [load_checkpoint(latest if rank == 0 else part_of(latest, rank)) for rank in range(ranks)]


def weights(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return state["algo"]["policy"]


@pytest.mark.parametrize("kind", SETTINGS)
def test_weights_are_equal_on_all_ranks_after_every_update(kind: str, tmp_path: Path) -> None:
    settings = {**SETTINGS[kind], "timesteps": 512, "run_name": "run", "runs_dir": str(tmp_path), "quiet": True}
    found = on_ranks("digests", 2, tmp_path, settings={**settings, "eval_every": 0})
    assert found[0] == found[1]
    assert len({*found[0]}) >= 4  # they have learned


def test_three_ranks_have_equal_weights(tmp_path: Path) -> None:
    settings = {**PPO, "n_envs": 3, "batch_size": 48, "timesteps": 384, "run_name": "run", "runs_dir": str(tmp_path)}
    found = on_ranks("digests", 3, tmp_path, settings={**settings, "eval_every": 0, "quiet": True})
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("kind", ["ppo", "strict", "sac", "dqn"])
def test_run_that_was_killed_resumes_bit_for_bit(kind: str, tmp_path: Path) -> None:
    settings = {**SETTINGS[kind], "timesteps": 768, "checkpoint_every": 128, "keep_checkpoints": 9}
    whole = new_run(tmp_path, "run", **settings)
    folder = tmp_path / "runs" / "run"
    shutil.copytree(folder, tmp_path / "runs" / "half")
    for part in (tmp_path / "runs" / "half" / "checkpoints").glob("step-*.pt"):
        if int(part.name[5:17]) > 384:
            part.unlink()  # as if it had been killed then
    resumed = train(tmp_path, "--resume", "runs/half", "--quiet")
    assert resumed.returncode == 0, resumed.stderr
    assert resumed.stderr == ""
    for one, other in zip(whole, states(tmp_path / "runs" / "half")):
        assert_same(one, other)
    assert not torch.equal(whole[0]["collector"]["obs"], whole[1]["collector"]["obs"])


def test_first_rollout_is_that_of_one_process(tmp_path: Path) -> None:
    """Environments and noise are those of the job, so that only the order of minibatches differs."""
    settings = {**PPO, "timesteps": 128}
    ranks, alone = new_run(tmp_path, "ranks", **settings), new_run(tmp_path, "alone", ranks=1, **settings)
    both = {name: torch.cat([state["collector"][name] for state in ranks]) for name in ("obs", "episode")}
    assert torch.equal(both["episode"], alone[0]["collector"]["episode"])
    assert torch.equal(both["obs"], alone[0]["collector"]["obs"])
    assert sorted(ranks[0]["collector"]["recent_returns"]) == sorted(alone[0]["collector"]["recent_returns"])


@pytest.mark.parametrize(("kind", "sizes"), [("ppo", (2, 1)), ("dqn", (1, 2))])
def test_other_number_of_ranks_continues_and_says_that_it_is_not_exact(
    kind: str, sizes: tuple[int, int], tmp_path: Path
) -> None:
    before, after = sizes
    new_run(tmp_path, "run", before, timesteps=256, **SETTINGS[kind])
    resumed = train(tmp_path, "--resume", "runs/run", "--quiet", ranks=after, timesteps=512)
    assert resumed.returncode == 0, resumed.stderr
    assert "it will not match an uninterrupted one" in resumed.stderr
    found = states(tmp_path / "runs" / "run", after)
    assert [state["step"] for state in found] == [512] * after
    assert sum(len(state["collector"]["episode"]) for state in found) == 4
    assert min(int(state["collector"]["episode"].min()) for state in found) > 0  # not the first episodes again


def test_only_rank_0_writes_evaluates_and_shows(tmp_path: Path) -> None:
    done = train(tmp_path, run_name="run", timesteps=256, eval_every=128, eval_episodes=2, **PPO)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("final evaluation") == 1
    folder = tmp_path / "runs" / "run"
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if record["kind"] == "evaluation"] == [128, 256]
    iterations = [record for record in records if record["kind"] == "iteration"]
    assert [record["step"] for record in iterations] == [128, 256]
    assert len([*folder.glob("tensorboard/*")]) == 1
    assert (folder / "report.html").exists()


def test_episodes_of_all_ranks_count(tmp_path: Path) -> None:
    found = new_run(tmp_path, "run", timesteps=1024, **PPO)
    ended = sum(int(state["collector"]["episode"].sum()) for state in found)
    assert found[0]["collector"]["episodes"] == ended > 10


def test_callback_of_rank_0_stops_all_ranks_at_the_same_iteration(tmp_path: Path) -> None:
    settings = {**PPO, "timesteps": 100_000, "run_name": "run", "runs_dir": str(tmp_path), "quiet": True}
    found = on_ranks("stop_by_callback", 2, tmp_path, iterations=3, settings={**settings, "eval_every": 0})
    assert found == [3, 3]
    assert [state["iteration"] for state in states(tmp_path / "run")] == [3, 3]


def test_target_return_stops_all_ranks(tmp_path: Path) -> None:
    done = train(tmp_path, run_name="run", timesteps=100_000, eval_every=256, target_return=5, seed=1, **PPO)
    assert done.returncode == 0, done.stderr
    first, second = states(tmp_path / "runs" / "run")
    assert first["step"] == second["step"] < 2000


# -- failures ----------------------------------------------------------------------------------------------------------


def started(folder: Path, *arguments: str, **settings: Any) -> subprocess.Popen[str]:
    """A job that trains for ever, once it has learned something."""
    everything = {**PPO, "timesteps": 10**9, "run_name": "run", "eval_every": 0, "checkpoint_every": 512, **settings}
    process = subprocess.Popen(
        command(*arguments, *flags(everything)),
        cwd=folder,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=restore_sigint,
    )
    assert wait_until(lambda: len([*folder.glob("runs/run/checkpoints/step-*.rank-1.pt")]) > 1, 60)
    return process


def ranks_of(process: subprocess.Popen[str]) -> dict[int, int]:
    """The processes of a job by rank."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    found = {}
    for child in children:
        environment = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        found.update({int(word[5:]): int(child) for word in environment if word.startswith(b"RANK=")})
    return found


@pytest.mark.parametrize("rank", [0, 1])
def test_killed_rank_ends_the_job_which_resumes_from_its_checkpoint(rank: int, tmp_path: Path) -> None:
    process = started(tmp_path)
    pids = ranks_of(process)
    os.kill(pids[rank], signal.SIGKILL)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGKILL if rank == 0 else process.returncode != 0
    assert f"Rank {rank} was killed by SIGKILL" in said
    assert not any(is_running(pid) for pid in pids.values())
    before = max(int(file.name[5:17]) for file in tmp_path.glob("runs/run/checkpoints/step-*.pt"))
    resumed = train(tmp_path, "--resume", "runs/run", "--quiet", timesteps=before + 256)
    assert resumed.returncode == 0, resumed.stderr
    assert {state["step"] for state in states(tmp_path / "runs" / "run")} == {before + 256}


def test_ctrl_c_ends_all_ranks_in_order(tmp_path: Path) -> None:
    process = started(tmp_path)
    pids = ranks_of(process)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT
    assert not any(is_running(pid) for pid in pids.values())
    first, second = states(tmp_path / "runs" / "run")
    assert first["step"] == second["step"]
    resumed = train(tmp_path, "--resume", "runs/run", "--quiet", timesteps=first["step"] + 128)
    assert (resumed.returncode, resumed.stderr) == (0, "")


def test_signal_to_one_rank_ends_all_in_order(tmp_path: Path) -> None:
    process = started(tmp_path)
    os.kill(ranks_of(process)[1], signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    first, second = states(tmp_path / "runs" / "run")
    assert first["step"] == second["step"]


@pytest.mark.parametrize("launcher_first", [True, False])
def test_scheduler_that_signals_launcher_and_ranks_does_not_keep_them_from_saving(
    launcher_first: bool, tmp_path: Path
) -> None:
    process = started(tmp_path)
    ranks = [*ranks_of(process).values()]
    for pid in [process.pid, *ranks] if launcher_first else [*ranks, process.pid]:
        os.kill(pid, signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, said
    first, second = states(tmp_path / "runs" / "run")
    assert first["step"] == second["step"] > 0


def test_failing_environment_of_one_rank_saves_all(tmp_path: Path) -> None:
    """The environment fails in the second rollout; what the first has taught is saved by both ranks."""
    fixed = tmp_path / "fixed"
    env = {"env": "rank_functions:FailsOnce", "env_kwargs": f"{{fixed: {fixed}}}", "max_env_restarts": 0}
    settings = {**PPO, **env, "timesteps": 512, "run_name": "run", "eval_every": 0, "seed": 3, "workers": 1}
    tests = str(Path(__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")])}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command(*arguments), cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
        )

    failed = run(*flags(settings))
    assert failed.returncode == 1
    assert failed.stderr.count("This environment is broken.") >= 1
    assert "unidle: Rank 1: " in failed.stderr
    assert "Fix it, then resume with: unidle train --resume runs/run" in failed.stderr
    assert [state["step"] for state in states(tmp_path / "runs" / "run")] == [128, 128]
    fixed.touch()
    resumed = run("--resume", "runs/run", "--quiet")
    assert (resumed.returncode, resumed.stderr) == (0, "")
    whole = run(*flags({**settings, "run_name": "whole"}), "--quiet")
    assert whole.returncode == 0, whole.stderr
    for one, other in zip(states(tmp_path / "runs" / "run"), states(tmp_path / "runs" / "whole")):
        assert_same(one["algo"], other["algo"])


@pytest.mark.parametrize("rank", [0, 1])
def test_nan_on_one_rank_ends_all_before_anything_is_logged(rank: int, tmp_path: Path) -> None:
    settings = {**PPO, "timesteps": 1024, "run_name": "run", "runs_dir": str(tmp_path), "quiet": True}
    first, second = on_ranks("non_finite", 2, tmp_path, rank=rank, settings={**settings, "eval_every": 128})
    env = 1 if rank == 0 else 3  # of the whole job
    assert f"Environment {env} returned a NaN or infinite" in first
    assert ("Rank 1: " in first) == (rank == 1)
    assert second.startswith("AgreedError")
    records = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert {record["step"] for record in records if record["kind"] in ("iteration", "evaluation")} == {128}


def test_checkpoint_that_one_rank_cannot_write_ends_all_with_its_reason(tmp_path: Path) -> None:
    settings = {**PPO, "timesteps": 1024, "run_name": "run", "runs_dir": str(tmp_path), "quiet": True}
    settings |= {"eval_every": 0, "checkpoint_every": 128}
    first, second = on_ranks("full_disk", 2, tmp_path, settings=settings)
    assert first == "TrainingError: Rank 1: The disk is full; free some space."
    assert second.startswith("AgreedError")


def test_final_checkpoint_has_no_pending_evaluations(tmp_path: Path) -> None:
    done = train(tmp_path, run_name="run", timesteps=256, eval_every=128, eval_episodes=2, eval_workers=1, **PPO)
    assert done.returncode == 0, done.stderr
    assert states(tmp_path / "runs" / "run")[0]["evaluations"] == []


def test_incomplete_checkpoint_is_not_used(tmp_path: Path) -> None:
    new_run(tmp_path, "run", timesteps=512, checkpoint_every=128, **PPO)
    folder = RunFolder.open(tmp_path / "runs" / "run")
    older, newest = folder.saved()
    part_of(newest, 1).unlink()
    resumed = train(tmp_path, "--resume", "runs/run", "--quiet", timesteps=640)
    assert resumed.returncode == 0, resumed.stderr
    assert f"{newest.name} in runs/run/checkpoints is damaged, or parts of it are missing." in resumed.stderr
    assert [state["step"] for state in states(folder.path)] == [640, 640]
    assert older.exists() is False


def test_damaged_part_of_a_checkpoint_is_not_used(tmp_path: Path) -> None:
    new_run(tmp_path, "run", timesteps=256, checkpoint_every=128, **PPO)
    newest = RunFolder.open(tmp_path / "runs" / "run").saved()[-1]
    part = part_of(newest, 1)
    part.write_bytes(part.read_bytes()[:-100])
    resumed = train(tmp_path, "--resume", "runs/run", "--quiet", timesteps=384)
    assert resumed.returncode == 0, resumed.stderr
    assert "is damaged, or parts of it are missing" in resumed.stderr


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {**PPO, "n_envs": 5},
            "`n_envs` is 5, which is not divisible by 2 ranks; use 4 or 6, or another number of ranks.",
        ),
        ({**PPO, "seeds": "2"}, "--seeds does not train on several ranks; remove --gpus and --ranks."),
        ({**PPO, "gpus": "2"}, "--gpus and --ranks both say how many ranks to start; remove one of them."),
        (
            {**PPO, "pin_cores": True},
            "--pin-cores cannot be used with several ranks, which would pin their workers to the same cores; leave it "
            "out.",
        ),
        (
            {**PPO, "env": "unidle/CartPole-v1", "batch_size": 32},
            "unidle/CartPole-v1 steps many environments together, which does not run on several ranks; leave out --gpus"
            ", --ranks and torchrun, or use an environment that creates one gymnasium.Env.",
        ),
    ],
)
def test_refused_in_one_sentence(settings: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    refused = train(tmp_path, "--quiet", timesteps=256, run_name="run", **settings)
    assert refused.returncode == 2
    assert refused.stderr == f"unidle: {sentence}\n"
    assert not (tmp_path / "runs" / "run").exists()


def test_torchrun_starts_the_same_job_which_repeats_bit_for_bit(tmp_path: Path) -> None:
    settings = {**PPO, "timesteps": 256}
    arguments = [*flags({**settings, "run_name": "torchrun", "eval_every": 0, "seed": 3}), "--quiet"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "unidle", "train"]
    done = subprocess.run([*torchrun, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for one, other in zip(states(tmp_path / "runs" / "torchrun"), new_run(tmp_path, "ranks", **settings)):
        assert_same(one, other)


def test_code_of_a_run_of_someone_else_is_refused_before_ranks_start(tmp_path: Path) -> None:
    new_run(tmp_path, "run", timesteps=128, **PPO)
    config = tmp_path / "runs" / "run" / "config.yaml"
    config.write_text(config.read_text().replace("env: CartPole-v1", "env: nowhere:Theirs"))
    refused = train(tmp_path, "--resume", "runs/run", "--quiet", timesteps=256)
    assert refused.returncode == 2
    assert refused.stderr.startswith("unidle: runs/run was not created by you on this machine")


def test_terminal_is_asked_once_and_then_the_ranks_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new_run(tmp_path, "run", timesteps=128, **PPO)
    config = tmp_path / "runs" / "run" / "config.yaml"
    config.write_text(config.read_text().replace("env: CartPole-v1", "env: nowhere:Theirs"))
    asked: list[Path] = []
    started: list[list[str]] = []
    monkeypatch.setattr(train_module, "is_trusted", lambda path, *_: asked.append(path) is None)
    monkeypatch.setattr(train_module, "start_ranks", lambda size, argv, _: started.append(argv))
    path = tmp_path / "runs" / "run"
    flags = ["--resume", str(path), "--ranks", "2"]
    train_module.train_command(flags)
    assert (asked, started) == ([path], [[*flags, "--trust"]])  # so that no rank asks again


# -- learning ----------------------------------------------------------------------------------------------------------


@pytest.mark.learning
def test_two_ranks_learn_cartpole(tmp_path: Path) -> None:
    done = train(
        tmp_path,
        "--quiet",
        "--json",
        env="CartPole-v1",
        n_envs=8,
        timesteps=60_000,
        seed=1,
        run_name="run",
        n_steps=64,
        batch_size=128,
        n_epochs=10,
        learning_rate=1e-3,
        eval_episodes=10,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["best_evaluation"] > 400
