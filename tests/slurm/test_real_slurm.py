"""Jobs on a real Slurm of three nodes: time limit, preemption, arrays, scancel; skipped where it is not installed."""

from __future__ import annotations

import io
import json
import os
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from resumed_runs import assert_same, final_state
from slurm_cluster import SlurmCluster, wait_for, why_not

import unidle
from unidle.cli.main import run as command_line
from unidle.slurm.attempts import step_of
from unidle.sweeps.folder import SweepFolder

pytestmark = [
    pytest.mark.skipif(why_not() is not None, reason=why_not() or ""),
    pytest.mark.timeout(280),
]

# In the first attempt of a job, a step takes longer, so that what happens to the job happens while it trains.
ENVIRONMENT = """
    import os
    import time

    from gymnasium.envs.classic_control import CartPoleEnv

    IS_SLOW = "SLURM_JOB_ID" in os.environ and "SLURM_RESTART_COUNT" not in os.environ


    class Slow(CartPoleEnv):
        def step(self, action):
            if IS_SLOW:
                time.sleep(0.01)
            return super().step(action)
"""
SMALL = shlex.split("--n-envs 1 --n-steps 32 --batch-size 32 --n-epochs 1 --net-arch 8 --no-tensorboard --no-subproc")
SMALL += ["--device", "cpu", "--eval-max-steps", "20", "--eval-episodes", "1"]
LONG = ["slow:Slow", *SMALL, "--timesteps", "16384", "--eval-every", "0", "--quiet"]  # 160 seconds if it is slow
SHORT = ["CartPole-v1", *SMALL, "--timesteps", "320"]
ODD_NAME = "limit #1 50%j it's"


@dataclass
class Jobs:
    """The jobs of this module, submitted together, because most of their time is waiting."""

    cluster: SlurmCluster
    folder: Path
    ids: dict[str, str] = field(default_factory=dict)

    def submit(self, name: str, *words: str) -> None:
        """Submit a job with `unidle slurm` in the folder."""
        code, printed = self.command("slurm", *words, "--run-name", name, "--json")
        assert code == 0, printed
        self.ids[name] = json.loads(printed)["job"]

    def command(self, *words: str) -> tuple[int, str]:
        """Run `unidle` in the folder, in this process, which has imported torch; its exit code, and what it prints."""
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as printed:
            patch.chdir(self.folder)
            for name in os.environ.keys() - self.cluster.environment.keys():
                patch.delenv(name)
            for name, value in self.cluster.environment.items():
                patch.setenv(name, value)
            return command_line(list(words)), printed.getvalue()

    def path(self, name: str) -> Path:
        return self.folder / "runs" / name

    def output(self, name: str) -> str:
        """What a job has printed."""
        return "\n".join(path.read_text() for path in sorted(self.path(name).glob("**/slurm-*.out")))

    def wait(self, name: str, seconds: float = 120) -> list[str]:
        """Wait until a job has ended; returns the states of its tasks."""
        ends = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED"}

        def ended() -> bool:
            states = self.cluster.states(self.ids[name])
            return bool(states) and set(states) <= ends

        wait_for(ended, seconds, lambda: self.explain(name))
        return self.cluster.states(self.ids[name])

    def explain(self, name: str) -> str:
        shown = self.cluster.run("scontrol", "show", "job", self.ids[name])
        return f"{self.output(name)}\n{shown}\n{self.cluster.logs()}"

    def wait_until_it_learns(self, name: str) -> None:
        metrics = self.path(name) / "metrics.jsonl"
        wait_for(lambda: metrics.exists() and metrics.read_text(), 90, lambda: self.explain(name))


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    cluster = SlurmCluster()
    try:
        cluster.start()
        jobs = Jobs(cluster, tmp_path_factory.mktemp("slurm"))
        (jobs.folder / "slow.py").write_text(textwrap.dedent(ENVIRONMENT))
        alone = ["--time=9", "--partition=gpu", "--sbatch"]
        submissions = [
            (ODD_NAME, "train", *LONG, "--time=1", "--signal=55", "--cpus-per-task=4", "--gres=gpu:a100:1"),
            ("preempted", "train", *LONG, *alone, "--nodelist=n3 --exclusive"),
            ("cancelled", "train", *LONG, "--time=9"),
            ("seeds", "train", *SHORT, "--time=9", "--array=seeds=2,7"),
            ("sweep", "sweep", *SHORT, "--time=9", "--array=jobs=2", "--trials=4", "--at-once=1"),
        ]
        for words in submissions:
            jobs.submit(*words)
        yield jobs
    finally:
        cluster.stop()


@pytest.fixture(scope="module")
def undisturbed(jobs: Jobs) -> Path:
    """The same run without SLURM."""
    words = ["train", *LONG, "--run-name", "undisturbed"]
    subprocess.run([sys.executable, "-m", "unidle", *words], cwd=jobs.folder, check=True)
    return jobs.path("undisturbed")


def test_cancelled_job_saves_a_checkpoint_and_is_not_requeued(jobs: Jobs) -> None:
    jobs.wait_until_it_learns("cancelled")
    jobs.cluster.run("scancel", jobs.ids["cancelled"])
    assert jobs.wait("cancelled") == ["CANCELLED"]
    step = step_of(jobs.path("cancelled"))
    assert step > 0
    assert f"The job was cancelled at step {step:,}; submit it again to continue." in jobs.output("cancelled")


def test_preempted_job_continues_exactly(jobs: Jobs, undisturbed: Path) -> None:
    jobs.wait_until_it_learns("preempted")
    urgent = ["sbatch", "--parsable", "--partition=urgent", "--nodelist=n3", "--exclusive", "--output=/dev/null"]
    assert jobs.cluster.run(*urgent, "--wrap", "sleep 1").strip().isdigit()
    assert jobs.wait("preempted") == ["COMPLETED"], jobs.output("preempted")
    assert "The job has to stop (SIGTERM): saving a checkpoint." in jobs.output("preempted")
    assert unidle.load(jobs.path("preempted"), trust=True).summary()["requeues"] == 1
    assert_same(final_state(jobs.path("preempted")), final_state(undisturbed))


def test_job_is_requeued_before_its_time_limit_and_continues_exactly(jobs: Jobs, undisturbed: Path) -> None:
    assert jobs.wait(ODD_NAME) == ["COMPLETED"], jobs.output(ODD_NAME)
    output = jobs.output(ODD_NAME)
    assert "The time limit is near: saving a checkpoint." in output
    assert "restart 1." in output
    if len(os.sched_getaffinity(0)) < 4:
        assert "This job asked for 4 cores and may use" in output
    assert unidle.load(jobs.path(ODD_NAME), trust=True).summary()["requeues"] == 1
    assert_same(final_state(jobs.path(ODD_NAME)), final_state(undisturbed))


def test_array_trains_its_seeds_as_a_group(jobs: Jobs) -> None:
    assert jobs.wait("seeds") == ["COMPLETED"] * 2, jobs.output("seeds")
    assert jobs.command("report", "runs/seeds")[0] == 0
    page = (jobs.path("seeds") / "report.html").read_text()
    assert "2 finished" in page
    configs = [unidle.load(jobs.path("seeds") / f"seed-{seed}").config.run.seed for seed in (2, 7)]
    assert configs == [2, 7]


def test_jobs_of_a_sweep_share_its_trials(jobs: Jobs) -> None:
    assert jobs.wait("sweep") == ["COMPLETED"] * 2, jobs.output("sweep")
    folder = SweepFolder.open(jobs.path("sweep"))
    assert sorted(path.name for path in folder.path.glob("trial-*")) == [f"trial-{number}" for number in range(4)]
    assert folder.best.is_file()


def test_job_that_slurm_refuses_leaves_nothing(jobs: Jobs, capsys: pytest.CaptureFixture[str]) -> None:
    assert jobs.command("slurm", "train", *SHORT, "--time=9", "--partition=absent", "--run-name", "refused")[0] == 2
    printed = capsys.readouterr().err
    assert "SLURM refused the job: " in printed
    assert "partition" in printed
    assert not jobs.path("refused").exists()
