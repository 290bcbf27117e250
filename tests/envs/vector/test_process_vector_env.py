"""`ProcessVectorEnv` is, step for step, Gymnasium's SyncVectorEnv."""

from __future__ import annotations

import gc
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
from toy_envs import Failing, Pictures, Senses, Walk, WhereAmI

import unidle
from unidle import ProcessVectorEnv, TrainingError, UsageError
from unidle.envs.vector.infos import merge_infos, to_columns

NEXT, SAME, DISABLED = AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED


class Doubles(gymnasium.Env):
    """Floats that no float32 holds, drawn from the seed; it remembers all its actions, and what it was reset with."""

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
        """Numbers of all kinds always; some things only at times."""
        info: dict[str, Any] = {"where": self.np_random.normal(), "steps": self._steps, "even": self._steps % 2 == 0}
        info |= {"dtype": str(action.dtype), "deep": {"a": np.float32(self._steps), "b": np.arange(3) * self._steps}}
        if self._steps % 3 == 0:
            info["now and then"] = np.full((2, 2), self._steps)
        return info


class Measured(Doubles):
    """Says the same few numbers after every step, as MuJoCo's do, and nothing after a reset."""

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        return super().reset(seed=seed)[0], {}

    def _info(self, action: np.ndarray) -> dict[str, Any]:
        where = self.np_random.normal(size=2)
        return {"x": where[0], "y": np.float32(where[1]), "n": self._steps, "late": self._steps > 3, "at": where}


TASKS: dict[str, Callable[[], gymnasium.Env]] = {
    "Discrete action": Walk,
    "Box of float64": Doubles,
    "numbers in infos": Measured,
    "picture": Pictures,
    "Dict and Tuple": Senses,
    "Discrete observation": lambda: gymnasium.make("FrozenLake-v1", max_episode_steps=7),
    "CartPole": lambda: gymnasium.make("CartPole-v1", max_episode_steps=12),
}


def same(left: Any, right: Any) -> bool:
    """Equal in structure, in dtypes and in every bit."""
    if isinstance(left, dict):
        return isinstance(right, dict) and list(left) == list(right) and all(same(left[k], right[k]) for k in left)
    if isinstance(left, (tuple, list)):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, np.ndarray) and left.dtype == object:
        return isinstance(right, np.ndarray) and right.dtype == object and same(left.tolist(), right.tolist())
    if isinstance(left, np.ndarray):
        return isinstance(right, np.ndarray) and left.dtype == right.dtype and np.array_equal(left, right)
    return type(left) is type(right) and left == right


def pair(env: Callable[[], gymnasium.Env], mode: AutoresetMode = NEXT, n_envs: int = 5) -> list[VectorEnv]:
    both = (
        SyncVectorEnv([env] * n_envs, autoreset_mode=mode),
        ProcessVectorEnv([env] * n_envs, 2, autoreset_mode=mode),
    )
    return list(both)


def play(both: list[VectorEnv], steps: int) -> int:
    """Step both alike and compare everything; returns how many episodes ended."""
    ended = 0
    both[0].action_space.seed(3)
    for _ in range(steps):
        actions = both[0].action_space.sample()
        left, right = (envs.step(actions) for envs in both)
        assert same(left, right)
        over = left[2] | left[3]
        ended += int(over.sum())
        if both[0].metadata["autoreset_mode"] is DISABLED and over.any():
            resets = [envs.reset(options={"reset_mask": over.copy(), "to": 3}) for envs in both]
            assert same(*resets)
    return ended


@pytest.mark.parametrize("mode", [NEXT, SAME, DISABLED])
@pytest.mark.parametrize("task", TASKS)
def test_every_step_is_the_same_as_in_gymnasiums_own(task: str, mode: AutoresetMode) -> None:
    both = pair(TASKS[task], mode)
    try:
        sync, ours = both
        assert isinstance(ours, VectorEnv)
        for name in ("single_observation_space", "single_action_space", "observation_space", "action_space"):
            assert getattr(ours, name) == getattr(sync, name)
        assert (ours.num_envs, ours.metadata, ours.render_mode) == (sync.num_envs, sync.metadata, sync.render_mode)
        assert same(*(envs.reset(seed=11) for envs in both))
        assert play(both, 60) >= 5
        assert same(*(envs.reset() for envs in both))  # without a seed, the streams run on
        play(both, 10)
    finally:
        for envs in both:
            envs.close()


def test_seeds_and_options_reach_the_environments_as_in_gymnasiums_own() -> None:
    both = pair(Doubles, n_envs=3)
    try:
        for seed, options in (
            (4, None),
            ([9, 8, 7], {"to": 1}),
            ([5, None, 6], None),
            (None, {}),
            (2, {"x": {"y": 1}}),
        ):
            left, right = (envs.reset(seed=seed, options=options) for envs in both)
            assert same(left, right)
            play(both, 3)
        assert both[0].np_random_seed == both[1].np_random_seed
        with pytest.raises(ValueError, match="seed has 2 entries for 3 environments"):
            both[1].reset(seed=[1, 2])
        for mask in ([True, False, False], np.zeros(3, np.bool_), np.ones(2, np.bool_), np.ones(3)):
            with pytest.raises(ValueError, match=r"^options\['reset_mask'\] must be a bool array of shape \(3,\)"):
                both[1].reset(options={"reset_mask": mask})
        play(both, 3)
    finally:
        for envs in both:
            envs.close()


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.int32])
def test_an_environment_gets_its_action_in_the_dtype_it_was_given(dtype: type) -> None:
    both = pair(Doubles, n_envs=2)
    try:
        for envs in both:
            envs.reset(seed=0)
        actions = (np.array([[0.1, 0.7], [-0.3, 1.0]]) * 3).astype(dtype)
        left, right = (envs.step(actions) for envs in both)
        assert same(left, right)
        assert right[4]["dtype"].tolist() == [np.dtype(dtype).name] * 2
        with pytest.raises(ValueError, match=r"^actions must have shape \(2, 2\), one per environment"):
            both[1].step(np.zeros((3, 2), np.float32))
    finally:
        for envs in both:
            envs.close()


# -- memory ------------------------------------------------------------------------------------------------------------


def test_what_was_returned_is_not_overwritten_unless_that_is_asked_for() -> None:
    for copy in (True, False):
        with_one = ProcessVectorEnv([Senses] * 2, 1, copy=copy)
        try:
            first, _ = with_one.reset(seed=1)
            kept = {"camera": first["camera"].copy(), "body": first["body"][0].copy()}
            outcome = with_one.step(with_one.action_space.sample())
            rewards = outcome[1].copy()
            unchanged = np.array_equal(first["camera"], kept["camera"]) and np.array_equal(
                first["body"][0], kept["body"]
            )
            assert unchanged == copy
            with_one.step(with_one.action_space.sample())
            assert np.array_equal(outcome[1], rewards)  # copied in any case
        finally:
            with_one.close()


def test_an_action_is_the_environments_to_keep() -> None:
    ours = ProcessVectorEnv([Doubles], 1)
    try:
        ours.reset(seed=3)
        ours.step(np.array([[1.0, 0.0]], np.float32))
        ours.step(np.array([[0.0, 0.5]], np.float32))
        kept = ours.get_attr("_actions")[0]
        assert [action.tolist() for action in kept] == [[1.0, 0.0], [0.0, 0.5]]
    finally:
        ours.close()


# -- attributes --------------------------------------------------------------------------------------------------------


def test_attributes_are_read_called_and_set_in_all_environments() -> None:
    both = pair(TASKS["CartPole"], n_envs=3)
    try:
        for envs in both:
            envs.reset(seed=1)
            envs.set_attr("gravity", 3.0)
            envs.set_attr("length", [0.1, 0.2, 0.3])
        assert both[0].get_attr("gravity") == both[1].get_attr("gravity") == (3.0,) * 3
        assert both[1].get_attr("length") == (0.1, 0.2, 0.3)
        assert both[1].call("has_wrapper_attr", "gravity") == (True,) * 3
        assert play(both, 13) > 0
        with pytest.raises(ValueError, match="values has 2 entries for 3 environments"):
            both[1].set_attr("gravity", [1.0, 2.0])
    finally:
        for envs in both:
            envs.close()


def test_every_environment_is_rendered() -> None:
    class Shown(Walk):
        metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012
        render_mode = "rgb_array"

        def render(self) -> Any:
            return np.full((2, 2, 3), self._steps, np.uint8)

    ours = ProcessVectorEnv([Shown] * 3, 2)
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
def test_infos_come_together_as_gymnasium_puts_them_together(infos: list[dict], everywhere: Any) -> None:
    if everywhere is not None:  # else columns would be rare
        infos = [{"same": everywhere} for _ in infos]
    vector = VectorEnv()
    vector.num_envs = 4

    def expected() -> Any:
        together: dict[str, Any] = {}
        for number, info in enumerate(infos):
            together = vector._add_info(together, info, number)
        return together

    parts = [[(env_id, infos[env_id]) for env_id in span if infos[env_id]] for span in ((0, 1, 2), (3,))]
    told = [to_columns(part, n) or None for part, n in zip(parts, (3, 1))]
    try:
        wanted = expected()
    except (ValueError, TypeError, OverflowError, AttributeError):
        return  # what Gymnasium cannot put together either
    assert same(merge_infos(told, [(0, 3), (3, 4)], vector._add_info), wanted)


# -- failures and the end ----------------------------------------------------------------------------------------------


def children() -> set[int]:
    found = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return {int(pid) for pid in found if is_running(int(pid))}


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def test_closing_ends_the_workers_and_closes_the_environments_and_does_no_harm_twice(tmp_path: Path) -> None:
    before, note, descriptors = children(), str(tmp_path), len(os.listdir("/proc/self/fd"))
    ours = ProcessVectorEnv([lambda: WhereAmI(note)] * 3, 2)
    pids = {int(pid) for pid in ours.reset()[0]["pid"][:, 0]}
    assert len(pids) == 2
    assert os.getpid() not in pids
    began = time.monotonic()
    ours.close()
    ours.close()
    assert time.monotonic() - began < 4
    assert children() == before
    assert {int(file.name) for file in tmp_path.iterdir()} == pids
    with pytest.raises(gymnasium.error.ClosedEnvironmentError):
        ours.step(np.zeros(3, np.int64))
    del ours
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def test_what_is_forgotten_is_closed() -> None:
    before = children()
    ours = ProcessVectorEnv([Walk], 1)
    assert children() != before
    del ours
    gc.collect()
    assert children() == before


def step_often(envs: VectorEnv) -> None:
    for _ in range(5):
        envs.step(np.zeros(envs.num_envs, np.int64))


def test_an_exception_names_the_environment_with_its_traceback_and_ends_all_workers() -> None:
    before = children()
    ours = ProcessVectorEnv([Walk, Walk, Failing], 2)
    ours.reset(seed=0)
    with pytest.raises(TrainingError) as failure:
        step_often(ours)
    first, *rest = str(failure.value).splitlines()
    assert first == "Environment 2 failed: ZeroDivisionError: the robot fell over"
    assert any("toy_envs.py" in env_id for env_id in rest)
    assert children() == before


def test_a_worker_that_is_killed_is_told_of() -> None:
    ours = ProcessVectorEnv([WhereAmI] * 3, 2)
    pids = ours.reset()[0]["pid"][:, 0]
    os.kill(int(pids[2]), signal.SIGKILL)
    sentence = r"^The worker of environments 2 to 2 exited unexpectedly \(exit status -9\)"
    with pytest.raises(TrainingError, match=sentence):
        step_often(ours)


class Dawdling(Walk):
    def step(self, action: Any) -> Any:
        time.sleep(0.3)
        return super().step(action)


def test_ctrl_c_in_a_step_closes_the_vector_env_so_that_stale_replies_are_never_read() -> None:
    before = children()
    ours = ProcessVectorEnv([Walk, Dawdling], 2)
    ours.reset(seed=0)
    interrupt = threading.Timer(0.1, signal.raise_signal, (signal.SIGINT,))
    with sigint_raises():
        interrupt.start()
        with pytest.raises(KeyboardInterrupt):
            step_often(ours)
    with pytest.raises(gymnasium.error.ClosedEnvironmentError, match="create a new one"):
        ours.reset()
    assert children() == before


def test_what_cannot_be_sent_to_the_environments_does_no_harm() -> None:
    with closing(ProcessVectorEnv([Walk, Walk], 2)) as ours:
        ours.reset(seed=0)
        with pytest.raises(TypeError):
            ours.set_attr("lock", threading.Lock())
        step_often(ours)


def test_a_factory_that_fails_is_told_of() -> None:
    def broken() -> gymnasium.Env:
        raise OSError("no such robot")

    before = children()
    with pytest.raises(TrainingError, match=r"^Environment 1 failed: OSError: no such robot"):
        ProcessVectorEnv([Walk, broken], 2)
    assert children() == before


@pytest.mark.parametrize(
    ("env_fns", "sentence"),
    [
        ([], r"^env_fns is empty; pass at least one factory\.$"),
        ([Walk, Pictures], r"^Environment 1 has other spaces than environment 0; make them all the same\.$"),
        ([lambda: Wordy()], r"^observation\['said'\] is a Text space, which has no fixed size; use Gymnasium's"),
    ],
)
def test_what_cannot_be_shared_is_refused(env_fns: list[Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        ProcessVectorEnv(env_fns, 1)


class Wordy(Walk):
    observation_space = spaces.Dict({"said": spaces.Text(3)})


def test_without_autoreset_an_episode_that_is_over_is_not_stepped() -> None:
    ours = ProcessVectorEnv([lambda: Walk(length=1), lambda: Walk(length=9)], 1, autoreset_mode=DISABLED)
    try:
        ours.reset(seed=0)
        ours.step(np.zeros(2, np.int64))
        with pytest.raises(gymnasium.error.ResetNeeded, match=r"^The episodes of environments \[0\] have ended"):
            ours.step(np.zeros(2, np.int64))
    finally:
        ours.close()


def test_a_script_without_a_main_guard_works_with_a_class_and_infos_of_its_own(tmp_path: Path) -> None:
    code = """
        import gymnasium, numpy as np, unidle

        class Own(gymnasium.Env):
            observation_space = gymnasium.spaces.Box(0, 99, (1,), np.float32)
            action_space = gymnasium.spaces.Discrete(2)
            def reset(self, *, seed=None, options=None):
                return np.array([30], np.float32), {}
            def step(self, action):
                return np.array([31], np.float32), 2.0, False, False, {"who": Own, "big": "x" * 100_000}

        envs = unidle.ProcessVectorEnv([Own, lambda: Own()], 2)
        envs.reset(seed=0)
        seen = envs.step([0, 1])
        print(seen[0].tolist(), seen[1].tolist(), [who.__name__ for who in seen[4]["who"]], len(seen[4]["big"][1]))
    """
    (tmp_path / "own.py").write_text(textwrap.dedent(code))
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run(
        [sys.executable, "own.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == "[[31.0], [31.0]] [2.0, 2.0] ['Own', 'Own'] 100000\n"
    assert done.stderr == ""


def test_when_the_program_is_killed_its_workers_end(tmp_path: Path) -> None:
    code = """
        import time, numpy as np, unidle
        from toy_envs import WhereAmI

        envs = unidle.ProcessVectorEnv([WhereAmI] * 2, 2)
        print(*envs.reset()[0]["pid"][:, 0], flush=True)
        time.sleep(600)
    """
    (tmp_path / "own.py").write_text(textwrap.dedent(code))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SOURCE), str(SOURCE.parent / "tests")])}
    with subprocess.Popen(
        [sys.executable, "own.py"], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
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


def test_workers_outlive_the_thread_that_started_them() -> None:
    made: list[ProcessVectorEnv] = []
    thread = threading.Thread(target=lambda: made.append(ProcessVectorEnv([Walk] * 2, 2)))
    thread.start()
    thread.join()
    try:
        made[0].reset(seed=0)
        step_often(made[0])
    finally:
        made[0].close()


def test_a_long_message_does_not_wait_for_a_worker_to_look_around() -> None:
    ours = ProcessVectorEnv([Walk] * 2, 2)
    try:
        ours.reset(seed=0)
        began = time.monotonic()
        for _ in range(5):
            ours.set_attr("note", "x" * 1_000_000)
        assert time.monotonic() - began < 3
        assert [len(note) for note in ours.get_attr("note")] == [1_000_000] * 2
    finally:
        ours.close()


def test_it_can_be_trained_on_like_any_vector_environment(tmp_path: Path) -> None:
    def make() -> VectorEnv:
        return ProcessVectorEnv([TASKS["CartPole"]] * 4, 2, autoreset_mode=SAME)

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
