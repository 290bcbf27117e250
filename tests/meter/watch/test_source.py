"""Finding a function's class from the source, and whether it steps an environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from unidle.meter.watch.source import function_at, package_of

SOURCE = """
class Game:
    speed = 1

    def reset(self): pass

    def step(self, action):
        return self.think(action)

    def think(self, action):
        def step(x):
            return x
        return step(action)

class TimeLimit(gym.Wrapper):
    def step(self, action):
        return 1

class Schedule:
    def step(self):
        return 1

class Mine(Base):
    def step(self, action):
        return 1

class Rate(Base):
    def step(self, closure=None):
        return 1

def step():
    return 1
"""


@pytest.mark.parametrize(
    ("line", "name", "found"),
    [
        (8, "step", ("Game.step", True)),
        (5, "reset", ("Game.reset", True)),
        (11, "think", ("Game.think", False)),
        (12, "step", ("step", False)),
        (17, "step", ("TimeLimit.step", True)),
        (21, "step", ("Schedule.step", False)),
        (25, "step", ("Mine.step", True)),
        (29, "step", ("Rate.step", False)),
        (32, "step", ("step", False)),
        (1, "<module>", ("<module>", False)),
        (999, "gone", ("gone", False)),
    ],
)
def test_function_at_finds_class_and_recognises_env_steps(
    tmp_path: Path, line: int, name: str, found: tuple[str, bool]
) -> None:
    path = tmp_path / "game.py"
    path.write_text(SOURCE)
    assert function_at(str(path), line, name) == found


def test_function_at_without_source_returns_plain_name() -> None:
    assert function_at("<string>", 1, "step") == ("step", False)


def test_package_of_file_is_outermost_folder_with_init(tmp_path: Path) -> None:
    inner = tmp_path / "outer" / "inner"
    inner.mkdir(parents=True)
    (inner / "__init__.py").touch()
    (inner.parent / "__init__.py").touch()
    assert package_of(str(inner / "module.py")) == "outer"
    assert package_of(str(tmp_path / "script.py")) == ""
