from __future__ import annotations

import contextlib
import sys
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import gymnasium
import numpy as np
import pytest
import toy_envs
from gymnasium import spaces
from toy_envs import Walk

import unidle
from unidle.envs import make
from unidle.envs.make import EnvMaker, callable_name, env_maker, is_reproducible
from unidle.errors import UsageError


def test_an_id_makes_the_registered_environment_with_its_kwargs() -> None:
    env = env_maker("CartPole-v1", {"max_episode_steps": 7})()
    assert env.spec.id == "CartPole-v1"
    assert env.spec.max_episode_steps == 7


def test_extra_arguments_reach_the_environment() -> None:
    assert env_maker("CartPole-v1")(render_mode="rgb_array").render_mode == "rgb_array"


def test_module_and_callable_name_a_factory() -> None:
    maker = env_maker("toy_envs:Walk", {"length": 3})
    env = maker()
    assert isinstance(env, Walk)
    assert env._last == 3
    assert maker.name == "toy_envs:Walk"


def test_a_module_in_the_current_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_own_envs_here.py").write_text("from toy_envs import Pictures as Mine\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert isinstance(env_maker("my_own_envs_here:Mine")(), toy_envs.Pictures)


def test_a_module_may_stand_before_an_id_that_it_registers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "registers_here.py").write_text(
        "import gymnasium\ngymnasium.register('Strolling-v3', entry_point='toy_envs:Walk', kwargs={'length': 4})\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    try:
        assert env_maker("registers_here:Strolling-v3")().unwrapped._last == 4
    finally:
        gymnasium.registry.pop("Strolling-v3", None)


def test_an_id_registered_here_is_known_where_the_maker_travels_to() -> None:
    gymnasium.register("Passing-v0", entry_point=Walk, kwargs={"length": 4})
    pickled = cloudpickle.dumps(env_maker("Passing-v0"))
    gymnasium.registry.pop("Passing-v0")
    assert cloudpickle.loads(pickled)().unwrapped._last == 4


def test_a_callable_is_taken_as_it_is_and_named_so_that_it_can_be_found_again() -> None:
    maker = env_maker(Walk, {"ending": "termination"})
    assert maker.name == "toy_envs:Walk"
    assert is_reproducible(maker.name)
    assert env_maker(maker.name).factory is Walk


def test_a_lambda_is_named_in_brackets_because_it_cannot_be_found_again() -> None:
    maker = env_maker(lambda: Walk())
    assert maker.name.startswith("<")
    assert not is_reproducible(maker.name)
    assert isinstance(maker(), Walk)


def test_something_else_of_the_same_name_does_not_count_as_finding_it_again() -> None:
    class Walk(toy_envs.Walk):
        pass

    Walk.__qualname__, Walk.__module__ = "Walk", "toy_envs"
    assert callable_name(Walk) == "<Walk>"


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("CartPool-v1", r"^There is no environment `CartPool-v1`: .*CartPole"),
        ("CartPole-v99", r"^There is no environment `CartPole-v99`: "),
        ("no_such_module:Env", r"^Module `no_such_module` cannot be found; run from its folder"),
        ("toy_envs:NoSuchEnv", r"^Module `toy_envs` has no callable `NoSuchEnv`; "),
        ("", r"^There is no environment ``"),
        ("<lambda>", r"^This run's environment was the Python object <lambda>; pass it again as env="),
    ],
)
def test_what_does_not_exist_is_said_in_one_sentence(name: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence) as refusal:
        env_maker(name)
    assert "\n" not in str(refusal.value)


def test_a_module_that_itself_lacks_something_shows_its_own_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lacks_something.py").write_text("import surely_not_installed\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="surely_not_installed"):
        env_maker("lacks_something:Env")


def test_arguments_that_the_environment_does_not_take_are_said() -> None:
    with pytest.raises(UsageError, match=r"^`CartPole-v1` does not accept these env_kwargs: .*gravity"):
        env_maker("CartPole-v1", {"gravity": 9})()


def test_a_factory_that_returns_something_else_is_refused() -> None:
    with pytest.raises(UsageError, match=r"^oops returned Discrete, not a gymnasium.Env; derive from gymnasium.Env"):
        EnvMaker("oops", lambda: spaces.Discrete(2))()


def test_a_misspelt_class_of_a_module_gets_the_name_that_is_there() -> None:
    with pytest.raises(UsageError, match=r"Module `toy_envs` has no callable `Wlak`; did you mean `Walk`\?"):
        env_maker("toy_envs:Wlak")


def test_arguments_that_a_factory_does_not_take_are_said_without_a_traceback() -> None:
    with pytest.raises(UsageError, match=r"toy_envs:Walk does not accept these env_kwargs: .*legnth"):
        env_maker("toy_envs:Walk", {"legnth": 3})()


@pytest.mark.parametrize(
    ("env", "decided"), [("unidle/CartPole-v1", "first_index"), ("gymnax:CartPole-v1", "n_envs"), ("brax:ant", "seed")]
)
def test_what_unidle_decides_itself_is_no_env_kwarg(env: str, decided: str) -> None:
    if not env.startswith("unidle/"):
        pytest.importorskip(env.partition(":")[0])
    with pytest.raises(UsageError, match=rf"^{env} does not accept these env_kwargs: .*{decided}"):
        env_maker(env, {decided: 1}).device_env(2, 0)


@pytest.mark.parametrize("name", ["unidle/Mission-v0", "unidle/Trading-v0"])
def test_gymnasium_knows_the_twins_by_the_same_name(name: str) -> None:
    found, own = gymnasium.make(f"unidle.envs:{name}"), env_maker(name)()
    with contextlib.closing(found), contextlib.closing(own):
        assert type(found.unwrapped) is type(own.unwrapped)
        first, _ = found.reset(seed=3)
        assert np.array_equal(first, own.reset(seed=3)[0])


def test_a_classic_task_on_the_device_has_gymnasiums_own_as_its_twin() -> None:
    maker = env_maker("unidle/CartPole-v1")
    with contextlib.closing(maker()) as env:
        assert env.spec is not None
        assert env.spec.id == "CartPole-v1"
    assert maker.on_host().kind == "gymnasium"
    assert env_maker("CartPole-v1").on_host().kind == "gymnasium"


# -- a user's own backend ----------------------------------------------------------------------------------------------


@pytest.fixture
def _backends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unidle.envs.make._BACKENDS", dict(make._BACKENDS))


def walks(name: str, kwargs: dict[str, Any]) -> Any:
    """A backend whose names say how long the walk is: `mysim:7`."""
    if not name.removeprefix("mysim:").isdigit():
        raise UsageError(f"mysim has no environment `{name}`.")
    return partial(Walk, length=int(name.removeprefix("mysim:")))


@pytest.mark.usefixtures("_backends")
def test_a_registered_backend_creates_the_environments_with_its_prefix() -> None:
    unidle.register_backend("mysim:", walks)
    maker = env_maker("mysim:7")
    assert (maker.name, maker()._last) == ("mysim:7", 7)
    assert cloudpickle.loads(cloudpickle.dumps(maker))()._last == 7
    with pytest.raises(UsageError, match=r"^mysim has no environment `mysim:fast`\.$"):
        env_maker("mysim:fast")


@pytest.mark.usefixtures("_backends")
def test_a_backend_may_return_an_env_maker() -> None:
    unidle.register_backend("mysim:", lambda name, kwargs: EnvMaker(name, Walk, kwargs, kind="gymnasium"))
    maker = env_maker("mysim:walk", {"length": 3})
    assert (maker.kind, maker()._last) == ("gymnasium", 3)


@pytest.mark.usefixtures("_backends")
def test_a_backend_given_by_name_is_imported_on_first_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mysim_backend.py").write_text(
        "import toy_envs\n\n\ndef backend(name, kwargs):\n    return toy_envs.Walk\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    unidle.register_backend("mysim:", "mysim_backend:backend")
    assert "mysim_backend" not in sys.modules
    assert isinstance(env_maker("mysim:walk")(), Walk)


@pytest.mark.usefixtures("_backends")
@pytest.mark.parametrize(
    ("backend", "sentence"),
    [
        ("no_such_sim.envs:backend", r"but module `no_such_sim` is not installed; install it\.$"),
        ("toy_envs:backend", r"but the module has no `backend`; fix its registration\.$"),
    ],
)
def test_a_backend_that_cannot_be_imported_is_one_clear_sentence(backend: str, sentence: str) -> None:
    unidle.register_backend("mysim:", backend)
    with pytest.raises(UsageError, match=rf"^The backend of `mysim:` is {backend}, {sentence}"):
        env_maker("mysim:walk")


@pytest.mark.parametrize(("prefix", "backend"), [("", walks), ("mysim:", "module_without_a_function")])
def test_a_backend_without_prefix_or_function_is_refused(prefix: str, backend: Any) -> None:
    with pytest.raises(UsageError, match="give a prefix, and a function or its `module:function`"):
        unidle.register_backend(prefix, backend)
