"""`ProcessVectorEnv` behaves like Gymnasium's SyncVectorEnv, step for step."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from hypothesis import given
from hypothesis import strategies as st
from paths import SOURCE
from processes import sigint_raises
from toy_envs import Failing, ImageEnv, MixedDictEnv, ProcessInfoEnv, Walk

import unidle
from unidle import ProcessVectorEnv, TrainingError, UsageError
from unidle.envs.vector.infos import merge_infos, to_columns

NEXT, SAME, DISABLED = AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED


class Float64Env(gymnasium.Env):
    """Random float64 observations that float32 cannot hold; keeps all its actions, and returns its reset options."""

    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float64)
    action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self._actions: list[np.ndarray] = []
        self._steps, self._last = 0, int(self.np_random.integers(1, 9))
        return self.np_random.normal(size=3), {"options": options, "seeded": str(seed)}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        self._actions.append(action)
        self._steps += 1
        observation = self.np_random.normal(size=3) + sum(self._actions).sum()
        terminated, truncated = self._steps == self._last, self._steps == 6
        return observation, float(observation[0]), terminated, truncated, self._info(action)

    def _info(self, action: np.ndarray) -> dict[str, Any]:
        """Values of several types in every step, one key only in some."""
        info: dict[str, Any] = {"noise": self.np_random.normal(), "steps": self._steps, "even": self._steps % 2 == 0}
        info |= {"dtype": str(action.dtype), "nested": {"a": np.float32(self._steps), "b": np.arange(3) * self._steps}}
        if self._steps % 3 == 0:
            info["sometimes"] = np.full((2, 2), self._steps)
        return info


class NumericInfos(Float64Env):
    """A few numbers in info after every step, as in MuJoCo environments, and none after a reset."""

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        return super().reset(seed=seed)[0], {}

    def _info(self, action: np.ndarray) -> dict[str, Any]:
        noise = self.np_random.normal(size=2)
        return {"x": noise[0], "y": np.float32(noise[1]), "n": self._steps, "late": self._steps > 3, "noise": noise}


TASKS: dict[str, Callable[[], gymnasium.Env]] = {
    "Discrete action": Walk,
    "Box of float64": Float64Env,
    "numbers in infos": NumericInfos,
    "image": ImageEnv,
    "Dict and Tuple": MixedDictEnv,
    "Discrete observation": lambda: gymnasium.make("FrozenLake-v1", max_episode_steps=7),
    "CartPole": lambda: gymnasium.make("CartPole-v1", max_episode_steps=12),
}


def identical(left: Any, right: Any) -> bool:
    """Equal structure, dtypes and values."""
    if isinstance(left, dict):
        return isinstance(right, dict) and list(left) == list(right) and all(identical(left[k], right[k]) for k in left)
    if isinstance(left, (tuple, list)):
        return type(left) is type(right) and len(left) == len(right) and all(map(identical, left, right))
    if isinstance(left, np.ndarray) and left.dtype == object:
        return isinstance(right, np.ndarray) and right.dtype == object and identical(left.tolist(), right.tolist())
    if isinstance(left, np.ndarray):
        return isinstance(right, np.ndarray) and left.dtype == right.dtype and np.array_equal(left, right)
    return type(left) is type(right) and left == right


def make_both(env: Callable[[], gymnasium.Env], mode: AutoresetMode = NEXT, n_envs: int = 5) -> list[VectorEnv]:
    both = (
        SyncVectorEnv([env] * n_envs, autoreset_mode=mode),
        ProcessVectorEnv([env] * n_envs, 2, autoreset_mode=mode),
    )
    return list(both)


def step_and_compare(both: list[VectorEnv], steps: int) -> int:
    """Step both with the same actions and compare everything; return the number of episodes that ended."""
    ended = 0
    both[0].action_space.seed(3)
    for _ in range(steps):
        actions = both[0].action_space.sample()
        left, right = (envs.step(actions) for envs in both)
        assert identical(left, right)
        done = left[2] | left[3]
        ended += int(done.sum())
        if both[0].metadata["autoreset_mode"] is DISABLED and done.any():
            resets = [envs.reset(options={"reset_mask": done.copy(), "to": 3}) for envs in both]
            assert identical(*resets)
    return ended


@pytest.mark.parametrize("mode", [NEXT, SAME, DISABLED])
@pytest.mark.parametrize("task", TASKS)
def test_every_step_equals_sync_vector_env(task: str, mode: AutoresetMode) -> None:
    both = make_both(TASKS[task], mode)
    try:
        sync, ours = both
        assert isinstance(ours, VectorEnv)
        for name in ("single_observation_space", "single_action_space", "observation_space", "action_space"):
            assert getattr(ours, name) == getattr(sync, name)
        assert (ours.num_envs, ours.metadata, ours.render_mode) == (sync.num_envs, sync.metadata, sync.render_mode)
        assert identical(*(envs.reset(seed=11) for envs in both))
        assert step_and_compare(both, 60) >= 5
        assert identical(*(envs.reset() for envs in both))  # without a seed, the random streams continue
        step_and_compare(both, 10)
    finally:
        for envs in both:
            envs.close()


def test_seeds_and_options_are_passed_as_in_sync_vector_env() -> None:
    both = make_both(Float64Env, n_envs=3)
    try:
        for seed, options in (
            (4, None),
            ([9, 8, 7], {"to": 1}),
            ([5, None, 6], None),
            (None, {}),
            (2, {"x": {"y": 1}}),
        ):
            left, right = (envs.reset(seed=seed, options=options) for envs in both)
            assert identical(left, right)
            step_and_compare(both, 3)
        assert both[0].np_random_seed == both[1].np_random_seed
        with pytest.raises(ValueError, match="seed has 2 entries for 3 environments"):
            both[1].reset(seed=[1, 2])
        wrong_masks = {ValueError: [np.zeros(3, np.bool_), np.ones(2, np.bool_)], TypeError: [[True] * 3, np.ones(3)]}
        for mask, kind in [(mask, kind) for kind, masks in wrong_masks.items() for mask in masks]:
            for envs in both:
                with pytest.raises(kind, match=r"^.?options\['reset_mask'\]"):
                    envs.reset(options={"reset_mask": mask})
        step_and_compare(both, 3)
    finally:
        for envs in both:
            envs.close()


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.int32])
def test_actions_keep_their_dtype(dtype: type) -> None:
    both = make_both(Float64Env, n_envs=2)
    try:
        for envs in both:
            envs.reset(seed=0)
        actions = (np.array([[0.1, 0.7], [-0.3, 1.0]]) * 3).astype(dtype)
        left, right = (envs.step(actions) for envs in both)
        assert identical(left, right)
        assert right[4]["dtype"].tolist() == [np.dtype(dtype).name] * 2
        with pytest.raises(ValueError, match=r"^actions must have shape \(2, 2\), one per environment"):
            both[1].step(np.zeros((3, 2), np.float32))
    finally:
        for envs in both:
            envs.close()


# -- memory ------------------------------------------------------------------------------------------------------------


def test_observations_are_overwritten_only_without_copy() -> None:
    for copy in (True, False):
        envs = ProcessVectorEnv([MixedDictEnv] * 2, 1, copy=copy)
        try:
            first, _ = envs.reset(seed=1)
            kept = {"camera": first["camera"].copy(), "body": first["body"][0].copy()}
            outcome = envs.step(envs.action_space.sample())
            rewards = outcome[1].copy()
            unchanged = np.array_equal(first["camera"], kept["camera"]) and np.array_equal(
                first["body"][0], kept["body"]
            )
            assert unchanged == copy
            envs.step(envs.action_space.sample())
            assert np.array_equal(outcome[1], rewards)  # rewards are always copied
        finally:
            envs.close()


def test_env_may_keep_its_actions() -> None:
    ours = ProcessVectorEnv([Float64Env], 1)
    try:
        ours.reset(seed=3)
        ours.step(np.array([[1.0, 0.0]], np.float32))
        ours.step(np.array([[0.0, 0.5]], np.float32))
        kept = ours.get_attr("_actions")[0]
        assert [action.tolist() for action in kept] == [[1.0, 0.0], [0.0, 0.5]]
    finally:
        ours.close()


# -- attributes --------------------------------------------------------------------------------------------------------


def test_attributes_are_read_set_and_called_in_all_envs() -> None:
    both = make_both(TASKS["CartPole"], n_envs=3)
    try:
        for envs in both:
            envs.reset(seed=1)
            envs.set_attr("gravity", 3.0)
            envs.set_attr("length", [0.1, 0.2, 0.3])
        assert both[0].get_attr("gravity") == both[1].get_attr("gravity") == (3.0,) * 3
        assert both[1].get_attr("length") == (0.1, 0.2, 0.3)
        assert both[1].call("has_wrapper_attr", "gravity") == (True,) * 3
        assert step_and_compare(both, 13) > 0
        with pytest.raises(ValueError, match="values has 2 entries for 3 environments"):
            both[1].set_attr("gravity", [1.0, 2.0])
    finally:
        for envs in both:
            envs.close()


def test_render_returns_one_frame_per_env() -> None:
    class Rendered(Walk):
        metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012
        render_mode = "rgb_array"

        def render(self) -> Any:
            return np.full((2, 2, 3), self._steps, np.uint8)

    ours = ProcessVectorEnv([Rendered] * 3, 2)
    try:
        ours.reset(seed=0)
        ours.step(np.zeros(3, np.int64))
        assert [frame.max() for frame in ours.render()] == [1, 1, 1]
    finally:
        ours.close()


# -- infos -------------------------------------------------------------------------------------------------------------

VALUES = st.one_of(
    st.integers(-3, 3),
    st.just(2**80),
    st.floats(-1, 1),
    st.booleans(),
    st.sampled_from([np.float32(1.5), np.int8(3), np.bool_(True), None, "text"]),
    st.sampled_from([np.arange(2), np.arange(2.0), np.zeros((1, 2)), np.array([None, 1])]),
    st.just({"inner": 1}),
)
KEYS = st.sampled_from(["a", "b", "c"])


@given(
    st.lists(st.dictionaries(KEYS, VALUES, max_size=2), min_size=4, max_size=4),
    st.sampled_from([None, VALUES]).flatmap(lambda kind: st.just(None) if kind is None else kind),
)
def test_infos_are_merged_as_in_gymnasium(infos: list[dict], shared_value: Any) -> None:
    if shared_value is not None:  # otherwise columns would be rare
        infos = [{"same": shared_value} for _ in infos]
    vector = VectorEnv()
    vector.num_envs = 4

    def expected() -> Any:
        merged: dict[str, Any] = {}
        for number, info in enumerate(infos):
            merged = vector._add_info(merged, info, number)
        return merged

    parts = [[(env_id, infos[env_id]) for env_id in span if infos[env_id]] for span in ((0, 1, 2), (3,))]
    columns = [to_columns(part, n) or None for part, n in zip(parts, (3, 1))]
    try:
        expected_infos = expected()
    except (ValueError, TypeError, OverflowError, AttributeError):
        return  # Gymnasium cannot merge these either
    assert identical(merge_infos(columns, [(0, 3), (3, 4)], vector._add_info), expected_infos)


# -- asynchronous calls ------------------------------------------------------------------------------------------------


def test_asynchronous_calls_return_what_the_others_return() -> None:
    both = make_both(TASKS["CartPole"], n_envs=3)
    try:
        sync, ours = both
        ours.reset_async(seed=4)
        assert identical(ours.reset_wait(), sync.reset(seed=4))
        for action in (0, 1, 1):
            ours.step_async([action] * 3)
            assert identical(ours.step_wait(), sync.step([action] * 3))
        ours.call_async("get_wrapper_attr", "gravity")
        assert ours.call_wait() == sync.call("get_wrapper_attr", "gravity")
    finally:
        for envs in both:
            envs.close()


def test_calls_out_of_order_raise_the_errors_of_gymnasium() -> None:
    with closing(ProcessVectorEnv([Walk] * 2, 1)) as ours:
        for call in ("reset", "step", "call"):
            message = rf"^Calling `{call}_wait` without any prior call to `{call}_async`\.$"
            with pytest.raises(gymnasium.error.NoAsyncCallError, match=message):
                getattr(ours, f"{call}_wait")()
        ours.reset()
        ours.step_async([0, 0])
        for call, name in (
            (ours.reset_async, "reset_async"),
            (lambda: ours.step_async([0, 0]), "step_async"),
            (lambda: ours.get_attr("spec"), "call_async"),
            (lambda: ours.set_attr("note", 1), "set_attr"),
        ):
            message = rf"^Calling `{name}` while waiting for a pending call to `step` to complete\.$"
            with pytest.raises(gymnasium.error.AlreadyPendingCallError, match=message):
                call()
        with pytest.raises(gymnasium.error.NoAsyncCallError):
            ours.reset_wait()
        assert ours.step_wait()[0].shape == (2, 2)


def test_step_that_timed_out_can_be_waited_for_again() -> None:
    with closing(ProcessVectorEnv([Walk, Slow], 2)) as ours:
        ours.reset(seed=0)
        ours.step_async([1, 1])
        with pytest.raises(
            multiprocessing.TimeoutError, match=r"^The call to `step_wait` has timed out after 0 second"
        ):
            ours.step_wait(timeout=0)
        assert ours.step_wait(timeout=60)[1].shape == (2,)
        step_five_times(ours)


def test_close_during_a_step_warns_and_ends_the_workers() -> None:
    before = children()
    ours = ProcessVectorEnv([Slow], 1)
    ours.reset(seed=0)
    ours.step_async([1])
    with pytest.warns(UserWarning, match="Calling `close` while waiting for a pending call to `step` to complete"):
        ours.close(terminate=True)
    assert children() == before


def test_missing_attribute_leaves_the_workers_alive() -> None:
    with closing(ProcessVectorEnv([Walk] * 3, 2)) as ours:
        ours.reset(seed=0)
        for call in (lambda: ours.get_attr("nowhere"), lambda: ours.call("nowhere", 3)):
            with pytest.raises(AttributeError, match="nowhere"):
                call()
        with pytest.raises(AttributeError):
            ours.set_attr("unwrapped", 3)  # a property without a setter
        step_five_times(ours)


# -- observation modes -------------------------------------------------------------------------------------------------


def scaled(bound: float) -> Callable[[], gymnasium.Env]:
    class Scaled(Walk):
        observation_space = spaces.Box(-bound, bound, (2,), np.float32)

    return Scaled


def test_observation_modes_equal_those_of_sync_vector_env() -> None:
    env_fns = [scaled(100.0), scaled(200.0)]
    own = (spaces.Box(-300.0, 300.0, (2, 2)), spaces.Box(-300.0, 300.0, (2,)))
    for mode in ("different", own):
        sync = SyncVectorEnv(env_fns, observation_mode=mode)
        with closing(ProcessVectorEnv(env_fns, 1, observation_mode=mode)) as ours:
            assert ours.observation_space == sync.observation_space
            assert ours.single_observation_space == sync.single_observation_space
            assert identical(ours.reset(seed=1), sync.reset(seed=1))
            assert identical(ours.step([0, 1]), sync.step([0, 1]))


@pytest.mark.parametrize(
    ("env_fns", "mode", "kind", "message"),
    [
        ([Walk], "varied", ValueError, "Invalid `observation_mode`, expected: 'same' or 'different' or tuple"),
        ([Walk], (1, 2), TypeError, "observation_mode must hold the batched and the single space"),
        ([Walk, ImageEnv], "different", RuntimeError, "their observations need the same shape and dtype"),
        ([Walk, scaled(3.0)], "same", RuntimeError, "the sub-environments observation spaces are not equivalent"),
    ],
    ids=["unknown", "no spaces", "other shape", "other bounds"],
)
def test_wrong_observation_mode_is_rejected(env_fns: Any, mode: Any, kind: type[Exception], message: str) -> None:
    before = children()
    with pytest.raises(kind, match=message):
        ProcessVectorEnv(env_fns, 1, observation_mode=mode)
    gc.collect()
    assert children() == before


def test_space_without_fixed_size_raises_the_error_of_gymnasium() -> None:
    with pytest.raises(gymnasium.error.CustomSpaceError):
        ProcessVectorEnv([lambda: TextObservation()], 1)


# -- failures and closing ----------------------------------------------------------------------------------------------


def children() -> set[int]:
    found = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return {int(pid) for pid in found if is_running(int(pid))}


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def test_close_ends_workers_and_can_be_called_twice(tmp_path: Path) -> None:
    before, folder, descriptors = children(), str(tmp_path), len(os.listdir("/proc/self/fd"))
    ours = ProcessVectorEnv([lambda: ProcessInfoEnv(folder)] * 3, 2)
    pids = {int(pid) for pid in ours.reset()[0]["pid"][:, 0]}
    assert len(pids) == 2
    assert os.getpid() not in pids
    start_time = time.monotonic()
    ours.close()
    ours.close()
    assert time.monotonic() - start_time < 4
    assert children() == before
    assert {int(file.name) for file in tmp_path.iterdir()} == pids
    with pytest.raises(gymnasium.error.ClosedEnvironmentError):
        ours.step(np.zeros(3, np.int64))
    del ours
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def test_garbage_collection_ends_workers() -> None:
    before = children()
    ours = ProcessVectorEnv([Walk], 1)
    assert children() != before
    del ours
    gc.collect()
    assert children() == before


def step_five_times(envs: VectorEnv) -> None:
    for _ in range(5):
        envs.step(np.zeros(envs.num_envs, np.int64))


def test_exception_names_env_and_ends_all_workers() -> None:
    before = children()
    ours = ProcessVectorEnv([Walk, Walk, Failing], 2)
    ours.reset(seed=0)
    with pytest.raises(TrainingError) as error:
        step_five_times(ours)
    first, *rest = str(error.value).splitlines()
    assert first == "Environment 2 failed: ZeroDivisionError: the robot fell over"
    assert any("toy_envs.py" in line for line in rest)
    assert children() == before


def test_wrong_argument_leaves_nothing_to_clean_up(monkeypatch: pytest.MonkeyPatch) -> None:
    ignored: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)
    with pytest.raises(TypeError, match="shared"):
        ProcessVectorEnv([Walk], shared=True)  # type: ignore[call-arg]
    gc.collect()
    assert ignored == []


def test_killed_worker_raises_training_error() -> None:
    ours = ProcessVectorEnv([ProcessInfoEnv] * 3, 2)
    pids = ours.reset()[0]["pid"][:, 0]
    os.kill(int(pids[2]), signal.SIGKILL)
    message = r"^The worker of environments 2 to 2 exited unexpectedly \(exit status -9\)"
    with pytest.raises(TrainingError, match=message):
        step_five_times(ours)


class Slow(Walk):
    def step(self, action: Any) -> Any:
        time.sleep(0.3)
        return super().step(action)


def test_ctrl_c_during_step_closes_vector_env() -> None:
    before = children()
    ours = ProcessVectorEnv([Walk, Slow], 2)
    ours.reset(seed=0)
    interrupt = threading.Timer(0.1, signal.raise_signal, (signal.SIGINT,))
    with sigint_raises():
        interrupt.start()
        with pytest.raises(KeyboardInterrupt):
            step_five_times(ours)
    with pytest.raises(gymnasium.error.ClosedEnvironmentError, match="create a new one"):
        ours.reset()
    assert children() == before


def test_vector_env_survives_unpicklable_attribute() -> None:
    with closing(ProcessVectorEnv([Walk, Walk], 2)) as ours:
        ours.reset(seed=0)
        with pytest.raises(TypeError):
            ours.set_attr("lock", threading.Lock())
        step_five_times(ours)


def test_failing_factory_raises_training_error() -> None:
    def broken() -> gymnasium.Env:
        raise OSError("no such robot")

    before = children()
    with pytest.raises(TrainingError, match=r"^Environment 1 failed: OSError: no such robot"):
        ProcessVectorEnv([Walk, broken], 2)
    assert children() == before


@pytest.mark.parametrize(
    ("env_fns", "message"),
    [
        ([], r"^env_fns is empty; pass at least one factory\.$"),
        (
            [Walk, ImageEnv],
            r"^Environment 1 and environment 0 have different spaces: the sub-environments observation spaces are not "
            r"equivalent\. Make them all the same\. If this is intentional, use `observation_mode='different'` "
            r"instead\.$",
        ),
        (
            [Walk, lambda: Float64Actions()],
            r"^Environment 1 and environment 0 have different spaces: the action spaces differ; make them all the "
            r"same\.$",
        ),
        (
            [lambda: TextObservation()],
            r"^observation\['text'\] is a Text space, which has no fixed size; use Gymnasium's",
        ),
    ],
)
def test_unsupported_envs_are_rejected(env_fns: list[Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ProcessVectorEnv(env_fns, 1)


class Float64Actions(Walk):
    action_space = spaces.Box(-1.0, 1.0, (2,), np.float64)


class TextObservation(Walk):
    observation_space = spaces.Dict({"text": spaces.Text(3)})


def test_disabled_autoreset_rejects_step_after_episode_end() -> None:
    ours = ProcessVectorEnv([lambda: Walk(length=1), lambda: Walk(length=9)], 1, autoreset_mode=DISABLED)
    try:
        ours.reset(seed=0)
        ours.step(np.zeros(2, np.int64))
        with pytest.raises(gymnasium.error.ResetNeeded, match=r"^The episodes of environments \[0\] have ended"):
            ours.step(np.zeros(2, np.int64))
    finally:
        ours.close()


def test_script_without_main_guard_may_define_env_and_infos(tmp_path: Path) -> None:
    code = """
        import gymnasium, numpy as np, unidle

        class CustomEnv(gymnasium.Env):
            observation_space = gymnasium.spaces.Box(0, 99, (1,), np.float32)
            action_space = gymnasium.spaces.Discrete(2)
            def reset(self, *, seed=None, options=None):
                return np.array([30], np.float32), {}
            def step(self, action):
                return np.array([31], np.float32), 2.0, False, False, {"cls": CustomEnv, "big": "x" * 100_000}

        envs = unidle.ProcessVectorEnv([CustomEnv, lambda: CustomEnv()], 2)
        envs.reset(seed=0)
        seen = envs.step([0, 1])
        print(seen[0].tolist(), seen[1].tolist(), [cls.__name__ for cls in seen[4]["cls"]], len(seen[4]["big"][1]))
    """
    (tmp_path / "script.py").write_text(textwrap.dedent(code))
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == "[[31.0], [31.0]] [2.0, 2.0] ['CustomEnv', 'CustomEnv'] 100000\n"
    assert done.stderr == ""


def test_workers_end_when_program_is_killed(tmp_path: Path) -> None:
    code = """
        import time, numpy as np, unidle
        from toy_envs import ProcessInfoEnv

        envs = unidle.ProcessVectorEnv([ProcessInfoEnv] * 2, 2)
        print(*envs.reset()[0]["pid"][:, 0], flush=True)
        time.sleep(600)
    """
    (tmp_path / "script.py").write_text(textwrap.dedent(code))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SOURCE), str(SOURCE.parent / "tests")])}
    with subprocess.Popen(
        [sys.executable, "script.py"], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
    ) as program:
        try:
            pids = [int(pid) for pid in program.stdout.readline().split()]
            assert all(map(is_running, pids))
            assert len(set(pids)) == 2
        finally:
            program.kill()
    end = time.monotonic() + 20
    while any(map(is_running, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(map(is_running, pids))


def test_workers_outlive_the_starting_thread() -> None:
    created: list[ProcessVectorEnv] = []
    thread = threading.Thread(target=lambda: created.append(ProcessVectorEnv([Walk] * 2, 2)))
    thread.start()
    thread.join()
    try:
        created[0].reset(seed=0)
        step_five_times(created[0])
    finally:
        created[0].close()


def test_long_message_does_not_wait_for_worker_timeout() -> None:
    ours = ProcessVectorEnv([Walk] * 2, 2)
    try:
        ours.reset(seed=0)
        start_time = time.monotonic()
        for _ in range(5):
            ours.set_attr("note", "x" * 1_000_000)
        assert time.monotonic() - start_time < 3
        assert [len(note) for note in ours.get_attr("note")] == [1_000_000] * 2
    finally:
        ours.close()


@pytest.mark.parametrize("mode", [NEXT, SAME])
def test_train_accepts_process_vector_env(mode: AutoresetMode, tmp_path: Path) -> None:
    def make() -> VectorEnv:
        return ProcessVectorEnv([TASKS["CartPole"]] * 4, 2, autoreset_mode=mode)

    run = unidle.train(
        make,
        preset="classic",
        n_steps=16,
        batch_size=32,
        timesteps=128,
        eval_every=0,
        quiet=True,
        runs_dir=str(tmp_path),
    )
    assert run.config.recipe.n_envs == 4
