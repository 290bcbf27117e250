"""`env_maker` resolves ids, `module:name` strings, callables and registered backends."""

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
from unidle.envs.import_name import callable_name, is_reproducible
from unidle.envs.make import EnvMaker, PerEnv, env_maker
from unidle.errors import UsageError


def test_id_creates_registered_env_with_kwargs() -> None:
    env = env_maker("CartPole-v1", {"max_episode_steps": 7})()
    assert env.spec.id == "CartPole-v1"
    assert env.spec.max_episode_steps == 7


def test_call_arguments_are_passed_to_env() -> None:
    assert env_maker("CartPole-v1")(render_mode="rgb_array").render_mode == "rgb_array"


def test_module_and_callable_string_resolves_to_factory() -> None:
    maker = env_maker("toy_envs:Walk", {"length": 3})
    env = maker()
    assert isinstance(env, Walk)
    assert env._last == 3
    assert maker.name == "toy_envs:Walk"


def test_module_in_current_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "local_envs.py").write_text("from toy_envs import ImageEnv as LocalEnv\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert isinstance(env_maker("local_envs:LocalEnv")(), toy_envs.ImageEnv)


def test_module_prefix_imports_module_that_registers_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "registers_env.py").write_text(
        "import gymnasium\ngymnasium.register('RegisteredWalk-v3', entry_point='toy_envs:Walk', kwargs={'length': 4})\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    try:
        assert env_maker("registers_env:RegisteredWalk-v3")().unwrapped._last == 4
    finally:
        gymnasium.registry.pop("RegisteredWalk-v3", None)


def test_pickled_maker_carries_gymnasium_registration() -> None:
    gymnasium.register("TemporaryWalk-v0", entry_point=Walk, kwargs={"length": 4})
    pickled = cloudpickle.dumps(env_maker("TemporaryWalk-v0"))
    gymnasium.registry.pop("TemporaryWalk-v0")
    assert cloudpickle.loads(pickled)().unwrapped._last == 4


def test_callable_gets_importable_name() -> None:
    maker = env_maker(Walk, {"ending": "termination"})
    assert maker.name == "toy_envs:Walk"
    assert is_reproducible(maker.name)
    assert env_maker(maker.name).factory is Walk


def test_lambda_name_is_bracketed_and_not_reproducible() -> None:
    maker = env_maker(lambda: Walk())
    assert maker.name.startswith("<")
    assert not is_reproducible(maker.name)
    assert isinstance(maker(), Walk)


def test_class_that_shadows_importable_name_is_not_reproducible() -> None:
    class Walk(toy_envs.Walk):
        pass

    Walk.__qualname__, Walk.__module__ = "Walk", "toy_envs"
    assert callable_name(Walk) == "<Walk>"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("CartPool-v1", r"^There is no environment `CartPool-v1`: .*CartPole"),
        ("CartPole-v99", r"^There is no environment `CartPole-v99`: "),
        ("no_such_module:Env", r"^Module `no_such_module` cannot be found; run from its folder"),
        ("toy_envs:NoSuchEnv", r"^Module `toy_envs` has no callable `NoSuchEnv`; "),
        ("", r"^No environment given; pass an id"),
        ("<lambda>", r"^This run's environment was the Python object <lambda>; pass it again as env="),
    ],
)
def test_unknown_env_is_one_line_error(name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as error:
        env_maker(name)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("name", "module"), [("my_env.py", "my_env"), ("my_env", "my_env"), ("sub/it.py", "sub.it")])
def test_error_for_python_file_says_how_to_name_its_class(
    name: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sub").mkdir()
    for file in ("my_env.py", "sub/it.py"):
        (tmp_path / file).touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=f"^`{name}` is a Python file; name its environment class too: {module}:"):
        env_maker(name)


def test_import_error_inside_module_is_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_import.py").write_text("import surely_not_installed\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="surely_not_installed"):
        env_maker("broken_import:Env")


def test_unknown_env_kwargs_of_registered_env_are_named() -> None:
    with pytest.raises(UsageError, match=r"^`CartPole-v1` does not accept these env_kwargs: .*gravity"):
        env_maker("CartPole-v1", {"gravity": 9})()


def test_factory_must_return_gymnasium_env() -> None:
    with pytest.raises(UsageError, match=r"^oops returned Discrete, not a gymnasium.Env; derive from gymnasium.Env"):
        EnvMaker("oops", lambda: spaces.Discrete(2))()


def test_misspelt_class_gets_suggestion() -> None:
    with pytest.raises(UsageError, match=r"Module `toy_envs` has no callable `Wlak`; did you mean `Walk`\?"):
        env_maker("toy_envs:Wlak")


def test_unknown_env_kwargs_of_factory_are_named() -> None:
    with pytest.raises(UsageError, match=r"toy_envs:Walk does not accept these env_kwargs: .*legnth"):
        env_maker("toy_envs:Walk", {"legnth": 3})()


@pytest.mark.parametrize(
    ("env", "reserved"), [("unidle/CartPole-v1", "first_index"), ("gymnax:CartPole-v1", "n_envs"), ("brax:ant", "seed")]
)
def test_reserved_argument_is_rejected_as_env_kwarg(env: str, reserved: str) -> None:
    if not env.startswith("unidle/"):
        pytest.importorskip(env.partition(":")[0])
    with pytest.raises(UsageError, match=rf"^{env} does not accept these env_kwargs: .*{reserved}"):
        env_maker(env, {reserved: 1}).device_env(2, 0)


@pytest.mark.parametrize("name", ["unidle/Mission-v0", "unidle/Trading-v0"])
def test_bundled_env_is_registered_with_gymnasium(name: str) -> None:
    from_gymnasium, from_unidle = gymnasium.make(f"unidle.envs:{name}"), env_maker(name)()
    with contextlib.closing(from_gymnasium), contextlib.closing(from_unidle):
        assert type(from_gymnasium.unwrapped) is type(from_unidle.unwrapped)
        first, _ = from_gymnasium.reset(seed=3)
        assert np.array_equal(first, from_unidle.reset(seed=3)[0])


def test_host_version_of_device_cartpole_is_gymnasiums() -> None:
    maker = env_maker("unidle/CartPole-v1")
    with contextlib.closing(maker()) as env:
        assert env.spec is not None
        assert env.spec.id == "CartPole-v1"
    assert maker.on_host().kind == "gymnasium"
    assert env_maker("CartPole-v1").on_host().kind == "gymnasium"


# -- registered backends -----------------------------------------------------------------------------------------------


@pytest.fixture
def _restore_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unidle.envs.make._BACKENDS", dict(make._BACKENDS))


def walk_backend(name: str, kwargs: dict[str, Any]) -> Any:
    """A backend whose env name is the length of the walk: `mysim:7`."""
    if not name.removeprefix("mysim:").isdigit():
        raise UsageError(f"mysim has no environment `{name}`.")
    return partial(Walk, length=int(name.removeprefix("mysim:")))


@pytest.mark.usefixtures("_restore_backends")
def test_registered_backend_creates_envs_with_its_prefix() -> None:
    unidle.register_backend("mysim:", walk_backend)
    maker = env_maker("mysim:7")
    assert (maker.name, maker()._last) == ("mysim:7", 7)
    assert cloudpickle.loads(cloudpickle.dumps(maker))()._last == 7
    with pytest.raises(UsageError, match=r"^mysim has no environment `mysim:fast`\.$"):
        env_maker("mysim:fast")


@pytest.mark.usefixtures("_restore_backends")
def test_backend_may_return_env_maker() -> None:
    unidle.register_backend("mysim:", lambda name, kwargs: EnvMaker(name, Walk, kwargs, kind="gymnasium"))
    maker = env_maker("mysim:walk", {"length": 3})
    assert (maker.kind, maker()._last) == ("gymnasium", 3)


@pytest.mark.usefixtures("_restore_backends")
def test_backend_given_by_name_is_imported_on_first_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mysim_backend.py").write_text(
        "import toy_envs\n\n\ndef backend(name, kwargs):\n    return toy_envs.Walk\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    unidle.register_backend("mysim:", "mysim_backend:backend")
    assert "mysim_backend" not in sys.modules
    assert isinstance(env_maker("mysim:walk")(), Walk)


@pytest.mark.usefixtures("_restore_backends")
@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("no_such_sim.envs:backend", r"but module `no_such_sim` is not installed; install it\.$"),
        ("toy_envs:backend", r"but the module has no `backend`; fix its registration\.$"),
    ],
)
def test_backend_that_cannot_be_imported_is_one_line_error(backend: str, message: str) -> None:
    unidle.register_backend("mysim:", backend)
    with pytest.raises(UsageError, match=rf"^The backend of `mysim:` is {backend}, {message}"):
        env_maker("mysim:walk")


@pytest.mark.parametrize(("prefix", "backend"), [("", walk_backend), ("mysim:", "module_without_a_function")])
def test_backend_without_prefix_or_function_is_rejected(prefix: str, backend: Any) -> None:
    with pytest.raises(UsageError, match="give a prefix, and a function or its `module:function`"):
        unidle.register_backend(prefix, backend)


def test_each_environment_of_a_run_has_its_own_function() -> None:
    maker = env_maker(PerEnv([lambda length=length: Walk(length=length) for length in (2, 3)]))
    assert [maker.of_env(index)()._last for index in range(4)] == [2, 3, 2, 3]
    assert env_maker(Walk).of_env(1)()._last == 6
