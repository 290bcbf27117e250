"""unidle's environments are registered with Gymnasium, without making `import unidle` slow."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from paths import SOURCE


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout.strip()


@pytest.mark.parametrize(
    "code",
    [
        "import gymnasium, unidle; env = gymnasium.make('unidle/Mission-v0')",
        "import gymnasium; env = gymnasium.make('unidle:unidle/Mission-v0')",
        "import unidle, gymnasium; env = gymnasium.make('unidle.envs:unidle/Mission-v0')",
    ],
    ids=["imported", "module in the id", "imported first"],
)
def test_gymnasium_makes_unidles_environments(code: str) -> None:
    assert run(f"{code}; print(env.reset(seed=0)[0] in env.observation_space)") == "True"


def test_importing_unidle_imports_neither_gymnasium_nor_torch() -> None:
    assert run("import sys, unidle; print({'gymnasium', 'numpy', 'torch'} & sys.modules.keys())") == "set()"
