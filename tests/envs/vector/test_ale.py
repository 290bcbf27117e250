"""Atari games by id: ale-py's vector environment, here and in halves, equals itself stepped by hand."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from processes import wait_until

import unidle
from unidle.engine.checkpoint.checkpoint_file import load_checkpoint
from unidle.envs.check_env import check_env
from unidle.envs.make import env_maker
from unidle.envs.pool.slot import episode_seed
from unidle.envs.probe import probe
from unidle.envs.protocol import HostEnvs
from unidle.envs.vector.host_envs import make_vector_envs
from unidle.envs.vector.pool import VectorPool
from unidle.errors import UsageError

SEED, N, NOOP, FIRE = 5, 4, 0, 1
SHORT = {"max_num_frames_per_episode": 160}  # truncated after some 30 steps


@pytest.fixture
def ale_py() -> Any:
    return pytest.importorskip("ale_py")


@pytest.fixture
def by_hand(ale_py: Any) -> Any:
    """A function that creates an AtariVectorEnv and resets it with the seeds of a run."""

    def create(game: str = "breakout", **kwargs: Any) -> tuple[Any, np.ndarray]:
        env = ale_py.AtariVectorEnv(game, N, autoreset_mode=AutoresetMode.SAME_STEP, num_threads=1, **kwargs)
        return env, env.reset(seed=np.array([episode_seed(SEED, 40 + env_id, 0) for env_id in range(N)]))[0]

    return create


def open_envs(place: str, **kwargs: Any) -> HostEnvs:
    maker = env_maker("ale:breakout", kwargs)
    env_spec = probe(maker)
    if place == "in this process":
        return make_vector_envs(maker, env_spec, N, SEED, 40)
    if place == "halves in this process":
        return make_vector_envs(maker, env_spec, N, SEED, 40, slices=2)
    return VectorPool(maker, env_spec, N, SEED, 2, 40)


def stepped(envs: HostEnvs, steps: int) -> Iterator[np.ndarray]:
    """Random actions, after each of which the environments have stepped."""
    rng, slices = np.random.default_rng(0), list(range(len(envs.bounds)))
    for _ in range(steps):
        actions = rng.integers(0, 4, N)
        envs.block.actions[:, 0] = actions
        envs.send(slices)
        done: list[int] = []
        while len(done) < len(slices):
            done += envs.recv(1)
        yield actions


@pytest.mark.parametrize("sticky", [0.0, 0.25])
@pytest.mark.parametrize("place", ["in this process", "halves in this process", "halves in processes"])
def test_block_equals_atari_vector_env_stepped_by_hand(by_hand: Any, place: str, sticky: float) -> None:
    kwargs = {**SHORT, "repeat_action_probability": sticky}
    reference, expected = by_hand(**kwargs)
    with closing(open_envs(place, **kwargs)) as envs:
        assert len(envs.bounds) == 1 + ("halves" in place)
        envs.start(np.zeros(N, np.int64))
        obs = envs.block.obs.reshape(N, 4, 84, 84)
        assert np.array_equal(obs, expected)
        cut = 0
        for actions in stepped(envs, 100):
            expected, rewards, terminated, truncated, infos = reference.step(actions)
            assert np.array_equal(obs, expected)
            assert np.array_equal(envs.block.reward, rewards)
            assert np.array_equal(envs.block.terminated, terminated)
            assert np.array_equal(envs.block.truncated, truncated & ~terminated)
            for env_id in np.flatnonzero(envs.block.truncated):
                cut += 1
                final = envs.block.final_obs[env_id].reshape(4, 84, 84)
                assert np.array_equal(final, infos["final_obs"][env_id])
                assert not np.array_equal(final, obs[env_id])
        assert cut >= 2 * N


def test_clipped_rewards_equal_those_of_ale_and_returns_are_scores(ale_py: Any) -> None:
    def play(game: str, **kwargs: Any) -> tuple[list[Any], list[Any]]:
        maker = env_maker(f"ale:{game}", {"max_num_frames_per_episode": 2000, **kwargs})
        rewards, returns = [], []
        with closing(make_vector_envs(maker, probe(maker), N, SEED)) as envs:
            envs.start(np.zeros(N, np.int64))
            for _ in stepped_with(envs, 6, 520):
                rewards.append(envs.block.reward.tolist())
                ended = envs.block.terminated | envs.block.truncated
                returns += envs.block.episode_return[ended].tolist()
        return rewards, returns

    # In Assault a hit is worth 21 points.
    clipped, scores = play("assault")
    raw, raw_scores = play("assault", reward_clipping=False)
    assert np.max(raw) > 1
    assert np.array_equal(np.clip(raw, -1, 1), clipped)
    assert scores == raw_scores
    assert max(scores) > 20

    own = ale_py.AtariVectorEnv("assault", N, autoreset_mode=AutoresetMode.SAME_STEP, max_num_frames_per_episode=2000)
    own.reset(seed=np.array([episode_seed(SEED, env_id, 0) for env_id in range(N)]))
    rng = np.random.default_rng(0)
    assert [own.step(rng.integers(0, 6, N))[1].tolist() for _ in range(520)] == clipped


def stepped_with(envs: HostEnvs, n_actions: int, steps: int) -> Iterator[None]:
    rng = np.random.default_rng(0)
    for _ in range(steps):
        envs.block.actions[:, 0] = rng.integers(0, n_actions, N)
        envs.send([0])
        envs.recv(1)
        yield


def test_lost_life_ends_the_episode_only_if_asked_for_and_never_in_evaluations(ale_py: Any) -> None:
    maker = env_maker("ale:breakout", {"life_loss_info": True})
    env_spec, ends = probe(maker), []
    for each in (maker, maker.for_evaluation(), env_maker("ale:breakout")):
        with closing(make_vector_envs(each, env_spec, N, SEED)) as envs:
            envs.start(np.zeros(N, np.int64))
            ends.append(sum(int(envs.block.terminated.sum()) for _ in stepped(envs, 60)))
    assert ends[0] >= N
    assert ends[1:] == [0, 0]  # five lives


def test_close_ends_the_threads_of_ale(ale_py: Any) -> None:
    def threads() -> int:
        return len(list(Path("/proc/self/task").iterdir()))

    maker = env_maker("ale:breakout")
    env_spec, before = probe(maker), threads()
    envs = make_vector_envs(maker, env_spec, N, SEED)
    envs.start(np.zeros(N, np.int64))
    assert threads() > before
    envs.close()
    assert wait_until(lambda: threads() <= before)


def test_check_env_finds_nothing_wrong(ale_py: Any) -> None:
    found = check_env(env_maker("ale:breakout", SHORT), steps=320)
    assert found.episodes >= N
    assert not any("same seed" in remark for remark in found.remarks)


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("ale:Breakout", {}, r"^ale-py has no game `Breakout`; did you mean `ale:breakout`\?$"),
        ("ale:chess64", {}, r"^ale-py has no game `chess64`; "),
        ("ale:pong", {"num_envs": 4}, r"^ale-py's `num_envs` is set by n_envs; leave it out of env_kwargs\.$"),
        ("ale:pong", {"autoreset_mode": "NextStep"}, r"^ale-py's `autoreset_mode` is set by unidle itself; leave"),
        ("ale:pong", {"gravity": 4}, r"^ale:pong does not accept these env_kwargs: .*gravity"),
    ],
)
def test_mistake_is_one_line_error(ale_py: Any, name: str, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        probe(env_maker(name, kwargs))


def test_missing_ale_py_error_names_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ale_py", None)
    with pytest.raises(
        UsageError, match=r"^`ale:pong` needs the package ale-py; run: pip install 'unidle\[atari\]'\.$"
    ):
        env_maker("ale:pong")


# -- training ----------------------------------------------------------------------------------------------------------

SMALL: dict[str, Any] = {
    "env_kwargs": SHORT,
    "n_envs": N,
    "n_steps": 8,
    "batch_size": 16,
    "n_epochs": 1,
    "timesteps": 96,
    "tensorboard": False,
    "device": "cpu",
    "quiet": True,
}


def trained(tmp_path: Path, name: str, **settings: Any) -> dict[str, torch.Tensor]:
    """The weights after training."""
    folder = {"runs_dir": str(tmp_path), "run_name": name}
    run = unidle.train("ale:breakout", **{**SMALL, "eval_every": 0, **folder, **settings})
    weights: dict[str, torch.Tensor] = load_checkpoint(run.folder.latest())["algo"]["policy"]
    return weights


def test_strict_overlap_learns_the_same_in_halves_and_in_this_process(ale_py: Any, tmp_path: Path) -> None:
    halves = trained(tmp_path, "halves", overlap="strict", workers=2)
    here = trained(tmp_path, "here", overlap="strict", subproc=False)
    textbook = trained(tmp_path, "off", overlap="off")
    assert all(torch.equal(tensor, here[name]) for name, tensor in halves.items())
    assert not all(torch.equal(tensor, textbook[name]) for name, tensor in halves.items())


def test_evaluations_beside_training_equal_those_in_the_trainer(ale_py: Any, tmp_path: Path) -> None:
    def evaluations(name: str, processes: int) -> list[dict[str, Any]]:
        settings = {"eval_every": 48, "eval_episodes": 3, "eval_workers": processes, "runs_dir": str(tmp_path)}
        run = unidle.train("ale:breakout", **{**SMALL, **settings}, run_name=name)
        records = [record for record in run.records if record["kind"] == "evaluation"]
        kept = ("eval/return_mean", "eval/return_std", "eval/length_mean", "eval/episodes")
        return [{name: record[name] for name in kept} for record in records]

    here = evaluations("here", 0)
    assert len(here) == 2
    assert evaluations("beside", 2) == here


def test_preset_trains_and_evaluates_whole_games(
    ale_py: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"n_steps": 8, "batch_size": 16, "timesteps": 64, "eval_episodes": 2}
    kwargs = {"env_kwargs": {**SHORT, "life_loss_info": True}, "quiet": False}
    run = unidle.train(
        "ale:breakout", preset="atari", **{**SMALL, **sizes, **kwargs, "eval_every": 64}, runs_dir=str(tmp_path)
    )
    assert "ale:breakout, in this process" in capsys.readouterr().err
    [evaluation] = [record for record in run.records if record["kind"] == "evaluation"]
    assert evaluation["eval/length_mean"] > 25  # until the limit of frames, not until the first life is lost
    assert run.evaluate(2).mean_length > 25
