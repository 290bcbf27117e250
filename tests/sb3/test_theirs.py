"""Names that unidle does not replace: Stable-Baselines3's, or one sentence with the way out."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

import unidle.sb3
from unidle.errors import UsageError
from unidle.sb3 import PPO
from unidle.sb3.theirs import MissingNameError


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("common.noise", "OrnsteinUhlenbeckActionNoise"),
        ("common.torch_layers", "BaseFeaturesExtractor"),
        ("common.vec_env", "VecTransposeImage"),
        ("common.vec_env.vec_normalize", "VecNormalize"),
        ("common.results_plotter", "ts2xy"),
        ("ppo", "MlpPolicy"),
    ],
)
def test_what_unidle_does_not_replace_is_theirs(module: str, name: str) -> None:
    theirs = pytest.importorskip(f"stable_baselines3.{module}")
    assert getattr(import_module(f"unidle.sb3.{module}"), name) is getattr(theirs, name)


@pytest.mark.parametrize(
    ("module", "name"), [("ppo", "PPO"), ("common.vec_env.subproc_vec_env", "SubprocVecEnv"), ("dqn.dqn", "DQN")]
)
def test_what_unidle_replaces_is_unidles_under_every_name(module: str, name: str) -> None:
    pytest.importorskip("stable_baselines3")
    assert getattr(import_module(f"unidle.sb3.{module}"), name) is getattr(unidle.sb3, name)


def test_submodule_of_unidle_comes_first() -> None:
    from unidle.sb3.common import vec_env

    assert vec_env.__name__ == "unidle.sb3.common.vec_env"


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("from unidle.sb3 import A2C", "unidle has no A2C; use PPO"),
        ("from unidle.sb3.ddpg import DDPG", "unidle has no DDPG; use TD3"),
        ("from unidle.sb3 import HerReplayBuffer", "import it and SAC from stable_baselines3"),
    ],
)
def test_algorithm_that_unidle_does_not_have_is_refused_with_the_way_out(statement: str, message: str) -> None:
    with pytest.raises(MissingNameError, match=message) as caught:
        exec(statement, {})
    assert isinstance(caught.value, ImportError)  # for scripts that try another library


def test_name_that_neither_has_is_an_import_error() -> None:
    with pytest.raises(ImportError, match="cannot import name 'Nothing'"):
        exec("from unidle.sb3.common.noise import Nothing", {})
    with pytest.raises(ModuleNotFoundError, match="nothing"):
        import_module("unidle.sb3.common.nothing")
    assert not hasattr(unidle.sb3, "Nothing")


WITHOUT_SB3 = """
import sys
sys.modules["stable_baselines3"] = None  # importing it fails
import unidle.sb3.common.noise as noise
for statement in sys.argv[1:]:
    try:
        exec(statement)
    except ImportError as error:
        print(error)
assert not hasattr(noise, "Nothing")
"""


def test_without_stable_baselines3_its_names_say_what_to_install() -> None:
    statements = [
        "from unidle.sb3.common.noise import OrnsteinUhlenbeckActionNoise",
        "from unidle.sb3.common.torch_layers import BaseFeaturesExtractor",
    ]
    done = subprocess.run([sys.executable, "-c", WITHOUT_SB3, *statements], text=True, capture_output=True, check=True)
    first, second = done.stdout.splitlines()
    assert first.endswith("is Stable-Baselines3's own; run: pip install stable-baselines3")
    assert second.endswith("if it is one of Stable-Baselines3's, run: pip install stable-baselines3")


def test_attribute_that_a_model_does_not_have_says_what_to_do_instead() -> None:
    model = PPO("MlpPolicy", "CartPole-v1")
    with pytest.raises(UsageError, match=r"A PPO of unidle has no `rollout_buffer`; a callback has"):
        _ = model.rollout_buffer
    assert not hasattr(model, "save_replay_buffer")
    assert not hasattr(model, "nothing")
