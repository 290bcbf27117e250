"""The function that an activity is named for: the user's innermost one, with a line of the user's code."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import unidle
from unidle.meter.watch.places import Place, place_of
from unidle.meter.watch.samples import Frame, Stack, _frame

PACKAGES = "/lib/python3.11/site-packages"
MAIN = Frame("/home/me/train.py", "<module>", False, 30)
TRAIN = Frame(f"{PACKAGES}/stable_baselines3/ppo/ppo.py", "PPO.train", False, 200)
COLLECT = Frame(f"{PACKAGES}/stable_baselines3/common/on_policy_algorithm.py", "OnPolicy.collect_rollouts", False, 9)
MONITOR = Frame(f"{PACKAGES}/stable_baselines3/common/monitor.py", "Monitor.step", True, 94)
CHEETAH = Frame(f"{PACKAGES}/gymnasium/envs/mujoco/half_cheetah_v5.py", "HalfCheetahEnv.step", True, 240)
PHYSICS = Frame(f"{PACKAGES}/gymnasium/envs/mujoco/mujoco_env.py", "MujocoEnv.do_simulation", False, 150)
FORWARD = Frame(f"{PACKAGES}/torch/nn/modules/linear.py", "Linear.forward", False, 125)


def own(name: str, line: int, file: str = "/home/me/game.py") -> Frame:
    return Frame(file, name, False, line)


def stack(*frames: Frame, wall: float = 1.0) -> Stack:
    """A stack given from the outermost frame."""
    return Stack(0, tuple(reversed(frames)), wall, wall, 0.0, 0.0, 0.0)


def test_own_env_is_named_instead_of_library_wrapper_around_it() -> None:
    # The user's class defines only `step`, so that it is not recognised as an environment by itself.
    stacks = [stack(MAIN, COLLECT, MONITOR, own("Sub.step", 7), wall=3.0), stack(MAIN, COLLECT, MONITOR)]
    place = place_of(stacks, "environment")
    assert place == Place("Sub.step", 0.75, True, "/home/me/game.py", 7)
    assert place.source == "game.py:7"


def test_innermost_function_with_half_of_the_time_is_named() -> None:
    step, think, draw = own("Game.step", 5), own("Game.think", 9), own("Game.draw", 14)
    mostly_think = [stack(MONITOR, step, think, wall=6.0), stack(MONITOR, step, draw, wall=4.0)]
    assert place_of(mostly_think, "environment") == Place("Game.think", 0.6, True, "/home/me/game.py", 9)
    spread = [stack(MONITOR, step, own(f"Game.f{i}", 20 + i)) for i in range(5)]
    assert place_of(spread, "environment") == Place("Game.step", 1.0, True, "/home/me/game.py", 5)


def test_line_with_most_time_is_named_even_if_latest_sample_has_none() -> None:
    lines = [(31, 1.0), (33, 4.0), (0, 9.0)]
    stacks = [stack(MONITOR, own("Game.step", line), wall=wall) for line, wall in lines]
    place = place_of(stacks, "environment")
    assert place is not None
    assert (place.source, place.share) == ("game.py:33", 1.0)


def test_library_env_is_named_by_its_step_not_by_what_it_calls() -> None:
    place = place_of([stack(MAIN, COLLECT, MONITOR, CHEETAH, PHYSICS)], "environment")
    assert place is not None
    assert (place.function, place.source) == ("HalfCheetahEnv.step", "called in train.py:30")


def test_own_network_is_named_instead_of_library_that_trains_it() -> None:
    network = own("Net.forward", 12, "/home/me/net.py")
    slow = [stack(MAIN, TRAIN, network, FORWARD, wall=7.0), stack(MAIN, TRAIN, wall=3.0)]
    place = place_of(slow, "learning")
    assert place is not None
    assert (place.function, place.source) == ("Net.forward", "net.py:12")
    fast = [stack(MAIN, TRAIN, network, FORWARD, wall=1.0), stack(MAIN, TRAIN, FORWARD, wall=9.0)]
    place = place_of(fast, "learning")
    assert place is not None
    assert (place.function, place.source) == ("PPO.train", "called in train.py:30")


def test_own_function_in_a_phase_of_unidle_is_named_only_if_slow() -> None:
    library = Frame(str(Path(unidle.__file__).parent / "algos" / "ppo.py"), "PPO.update", False, 1)
    network = own("Net.forward", 12, "/home/me/net.py")

    def stacks(seconds: float) -> list[Stack]:
        both = [stack(MAIN, library, network, wall=seconds), stack(MAIN, library, wall=10.0 - seconds)]
        return [replace(one, phase="learn") for one in both]

    assert place_of(stacks(6.0), "learning") == Place("Net.forward", 0.6, True, "/home/me/net.py", 12)
    assert place_of(stacks(4.0), "learning") is None


def test_library_that_is_used_from_a_clone_is_not_own_code(tmp_path: Path) -> None:
    clone = tmp_path / "stable_baselines3" / "common"
    clone.mkdir(parents=True)
    for folder in (clone.parent, clone):
        (folder / "__init__.py").touch()
    monitor = Frame(str(clone / "monitor.py"), "Monitor.step", True, 94)
    place = place_of(
        [stack(MAIN, monitor, own("Sub.step", 7), Frame(str(clone / "x.py"), "f", False, 1))], "environment"
    )
    assert place is not None
    assert place.source == "game.py:7"


def test_frame_without_line_number_is_read() -> None:
    frame = _frame('  File "/home/me/train.py", line ??? in collect_rollouts')
    assert (frame.file, frame.name, frame.line) == ("/home/me/train.py", "collect_rollouts", 0)
