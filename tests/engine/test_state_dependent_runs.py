"""Training with state-dependent exploration (gSDE): smooth noise, resume, workers, overlap, export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from off_policy_runs import filled_sac, off_policy_run
from resumed_runs import StopAfter, assert_same, final_state
from small_envs import Drift
from small_runs import SmallRun, small_run
from torch.testing import assert_close

import unidle
from unidle.engine.export import export_onnx
from unidle.errors import UsageError

PPO: dict[str, Any] = {
    "preset": "classic",
    "n_envs": 3,
    "n_steps": 12,
    "batch_size": 12,
    "n_epochs": 2,
    "net_arch": (8,),
    "normalize_obs": True,
    "log_std_init": -1.0,
}
SAC: dict[str, Any] = {
    "preset": "sac",
    "n_envs": 2,
    "n_steps": 8,
    "batch_size": 16,
    "net_arch": (8,),
    "buffer_size": 200,
    "learning_starts": 50,
    "use_expln": True,
}
SMALL: dict[str, Any] = {
    "use_sde": True,
    "sde_sample_freq": 5,
    "eval_every": 96,
    "eval_episodes": 2,
    "tensorboard": False,
    "subproc": False,
    "device": "cpu",
    "seed": 5,
    "quiet": True,
}
RUNS: dict[str, dict[str, Any]] = {
    "ppo": PPO,
    "ppo, overlap": {**PPO, "overlap": "strict"},
    "ppo, lstm": {**PPO, "recurrent": "lstm", "recurrent_size": 8},
    "sac": SAC,
    "sac, overlap": {**SAC, "overlap": "strict"},
}
all_runs = pytest.mark.parametrize("name", RUNS)
ppo_and_sac = pytest.mark.parametrize("algo", ["ppo", "sac"])


def start(algo: str, **settings: Any) -> SmallRun:
    if algo == "ppo":
        return small_run(Drift, **{"use_sde": True, "log_std_init": -1.0, **settings})
    return off_policy_run(Drift, "sac", use_sde=True, **{"learning_starts": 0, "log_std_init": -1.0, **settings})


def noise_of_actions(run: SmallRun) -> tuple[np.ndarray, np.ndarray]:
    """Features and noise before squashing of a rollout's actions: [time, env, latent] and [time, env, reals]."""
    with torch.no_grad():
        params, _ = run.policy.act(run.rollout.obs[:-1].flatten(0, 1))
        actions = run.rollout.actions.flatten(0, 1)
        reached = actions.atanh() if run.policy.distribution.name == "squashed gsde" else actions
        noise = reached - params.mean
    lead = run.rollout.shape
    return params.latent.view(*lead, -1).numpy(), noise.view(*lead, -1).numpy()


@ppo_and_sac
def test_actions_are_smooth_inside_a_window_and_the_matrix_changes_after_it(algo: str) -> None:
    run = start(algo, net_arch=(2,), activation="tanh", n_steps=16, sde_sample_freq=8)
    run.collect()
    latent, noise = noise_of_actions(run)
    for env in range(2):
        matrices = []
        for window in (slice(0, 8), slice(8, 16)):
            # Eight equations for a 2 × 2 matrix: they only have a solution if it is the same in all steps.
            matrix = np.linalg.lstsq(latent[window, env], noise[window, env], rcond=None)[0]
            np.testing.assert_allclose(latent[window, env] @ matrix, noise[window, env], atol=2e-4)
            matrices.append(matrix)
        assert np.abs(matrices[0] - matrices[1]).min() > 1e-3
    assert not np.allclose(noise[:8, 0], noise[:8, 1])


@ppo_and_sac
def test_each_rollout_begins_with_new_matrices(algo: str) -> None:
    run = start(algo, sde_sample_freq=64)
    first, second = (run.collect() and run.collector._slots[0].inference.noise.matrices.clone() for _ in range(2))
    assert not np.isin(first.numpy(), second.numpy()).any()


@all_runs
def test_run_resumed_twice_equals_uninterrupted_run(name: str, tmp_path: Path) -> None:
    """Drift's episodes of 7 steps are open when the run stops."""
    settings = {**SMALL, **RUNS[name], "timesteps": 360, "env_kwargs": {"limit": 7}, "runs_dir": str(tmp_path)}
    uninterrupted = unidle.train(Drift, run_name="uninterrupted", **settings)
    unidle.train(Drift, run_name="resumed", after_iteration=[StopAfter(2)], **settings)
    unidle.resume(tmp_path / "resumed", env=Drift, quiet=True, after_iteration=[StopAfter(4)])
    resumed = unidle.resume(tmp_path / "resumed", env=Drift, quiet=True)
    state = final_state(uninterrupted.path)
    assert_same(final_state(resumed.path), state)
    trained = state["algo"]["policy"]["log_std"]
    assert trained.unique().numel() > 1  # each feature and action has its own


@all_runs
def test_worker_processes_do_not_change_final_state(name: str, tmp_path: Path) -> None:
    settings = {**SMALL, **RUNS[name], "timesteps": 180, "eval_every": 0, "runs_dir": str(tmp_path)}
    runs = [
        unidle.train(Drift, run_name=str(number), **{**settings, **engine})
        for number, engine in enumerate(({}, {"subproc": True, "workers": 2, "slices": 1}))
    ]
    serial, parallel = (final_state(run.path)["algo"] for run in runs)
    assert_same(parallel, serial)


@ppo_and_sac
def test_resumed_run_with_device_env_equals_uninterrupted_run(algo: str, tmp_path: Path) -> None:
    settings = {**SMALL, **{"ppo": PPO, "sac": SAC}[algo], "subproc": None, "timesteps": 216}
    settings |= {"eval_every": 0, "runs_dir": str(tmp_path)}
    uninterrupted = unidle.train("unidle/Pendulum-v1", run_name="uninterrupted", **settings)
    unidle.train("unidle/Pendulum-v1", run_name="resumed", after_iteration=[StopAfter(2)], **settings)
    resumed = unidle.resume(tmp_path / "resumed", quiet=True)
    assert_same(final_state(resumed.path), final_state(uninterrupted.path))


@pytest.mark.parametrize("recurrent", ["none", "lstm"])
def test_ratios_are_1_before_first_minibatch(recurrent: str) -> None:
    run = start("ppo", recurrent=recurrent, sde_sample_freq=4, normalize_obs=True, batch_size=32, n_epochs=1)
    for _ in range(2):
        run.collect()
        metrics = run.learn()
        assert metrics["approx_kl"] == pytest.approx(0.0, abs=1e-6)
        assert metrics["clip_fraction"] == 0.0
        assert metrics["std"] == pytest.approx(float(run.policy.log_std.detach().exp().mean()), rel=0.05)


def test_sac_reports_the_standard_deviation_of_its_matrices(tmp_path: Path) -> None:
    run = unidle.train(Drift, **{**SMALL, **SAC, "timesteps": 96, "runs_dir": str(tmp_path)})
    (last,) = [record for record in run.records if record["kind"] == "iteration"][-1:]
    assert last["train/std"] == pytest.approx(float(run.agent.policy.log_std.detach().exp().mean()))
    assert last["train/std"] == pytest.approx(np.exp(-3.0), rel=0.1)


def test_warm_up_is_uniform_unless_gsde_explores_then_too() -> None:
    def residual(run: SmallRun) -> float:
        """How far the noise of environment 0 is from a linear function of the features."""
        run.collect()
        latent, noise = (values[:, 0] for values in noise_of_actions(run))
        return float(np.abs(latent @ np.linalg.lstsq(latent, noise, rcond=None)[0] - noise).max())

    settings: dict[str, Any] = {"learning_starts": 1000, "n_steps": 100, "net_arch": (4,), "buffer_size": 1000}
    uniform, smooth = (start("sac", use_sde_at_warmup=given, **settings) for given in (False, True))
    assert residual(smooth) < 1e-3
    assert residual(uniform) > 0.5
    assert float(uniform.rollout.actions.std()) == pytest.approx(1 / np.sqrt(3), abs=0.06)


@ppo_and_sac
def test_export_and_prediction_are_the_deterministic_action(algo: str, tmp_path: Path) -> None:
    settings = {**SMALL, **{"ppo": PPO, "sac": SAC}[algo], "timesteps": 72, "runs_dir": str(tmp_path)}
    agent = unidle.train(Drift, **settings).agent
    observations = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32)
    expected = agent.predict(observations)
    assert np.array_equal(agent.predict(observations), expected)
    assert np.unique(expected).size > 20
    assert not np.allclose(agent.predict(observations, deterministic=False), expected)
    with torch.no_grad():
        agent.policy.log_std.fill_(3.0)
    assert np.array_equal(agent.predict(observations), expected)
    session = onnxruntime.InferenceSession(str(export_onnx(agent, tmp_path / "policy.onnx")))
    (exported,) = session.run(["action"], {"observation": observations})
    assert_close(torch.from_numpy(exported), torch.from_numpy(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("algo", "env"), [("ppo", "CartPole-v1"), ("sac", "CartPole-v1")])
def test_discrete_actions_are_refused(algo: str, env: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="`use_sde` needs continuous actions, but all actions here are discrete"):
        unidle.train(env, algo=algo, use_sde=True, runs_dir=str(tmp_path), quiet=True)


def test_kernels_decline_state_dependent_noise_with_a_reason() -> None:
    pytest.importorskip("triton")
    from unidle.algos.sac_kernels import unsupported
    from unidle.nn.describe import describe_actor, describe_small_mlp

    ppo, sac = start("ppo"), start("sac")
    reason = "the noise depends on the state (use_sde)"
    assert describe_small_mlp(ppo.policy) == describe_actor(ppo.policy) == "the action distribution is gsde"
    assert describe_actor(sac.policy) == unsupported(sac.algo.rule) == reason
    for run in (ppo, sac):
        assert run.collector._slots[0].inference._numpy_actor is None
    filled = filled_sac(Drift, use_sde=True)
    filled.algo.update(torch.Generator().manual_seed(0))
    assert list(filled.algo._dispatch.fallbacks.values()) == ["the action distribution is squashed gsde"]
