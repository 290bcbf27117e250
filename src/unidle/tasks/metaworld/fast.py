"""Meta-World at more than twice the speed, with bit-identical results.

Most of a stock step is Python overhead around MuJoCo: repeated name look-ups, a SciPy rotation for one matrix, NumPy
for scalars, and a loop over all contacts. `accelerate` changes the class of a package environment to a subclass in
which these are specialised for one environment. It performs the same operations in the same order and makes the same
MuJoCo calls, so observations, rewards and infos are equal bit for bit; tests check this on all 50 tasks. Only resets
differ: their result is cached.

The reward functions of the tasks are not rewritten. They are copied with other globals, in which `np.linalg.norm`,
`reward_utils.tolerance` and `Rotation` are the ones below, and `self.data` is read as `self._named`. The package itself
is not modified: environments that are not accelerated use the stock code.
"""

from __future__ import annotations

import importlib
import math
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from unidle.tasks.metaworld.env import unverified_version

# Imported by name: these packages are optional and have no type hints.
mujoco: Any = importlib.import_module("mujoco")
reward_utils: Any = importlib.import_module("metaworld.utils.reward_utils")
sawyer: Any = importlib.import_module("metaworld.sawyer_xyz_env")
tasks: Any = importlib.import_module("metaworld.env_dict")
SciPyRotation: Any = importlib.import_module("scipy.spatial.transform").Rotation

_clip: Any = (np._core if hasattr(np, "_core") else np.core).umath.clip  # the ufunc behind np.clip
_FLOAT64 = np.dtype(np.float64)
_HAND_DOWN = np.array([1.0, 0.0, 1.0, 0.0])  # the mocap body's quaternion
_STATE = mujoco.mjtState.mjSTATE_INTEGRATION
_mj_step, _mj_forward, _mj_rne_post_constraint = mujoco.mj_step, mujoco.mj_forward, mujoco.mj_rnePostConstraint
hamacher_product = reward_utils.hamacher_product


def accelerate(env: Any, say: Callable[[str], None] = warnings.warn) -> bool:
    """Accelerate a package environment, wrapped or not; if that is not possible, report why and return False."""
    env = env.unwrapped
    if isinstance(env, _Fast):
        return True
    reason = unverified_version()
    if reason is None and type(env) not in tasks.ALL_V3_ENVIRONMENTS.values():
        reason = f"{type(env).__name__} is not accelerated: only Meta-World's own 50 tasks are verified."
    if reason:
        say(reason)
        return False
    if not _scipy_agrees():
        say("Meta-World uses SciPy for quaternions, which is slower: this version of SciPy rounds differently.")
    env.__class__ = _fast_class(env.__class__)
    env._named = _CachedViews(env.data)
    return True


# -- scalars ---------------------------------------------------------------------------------------------------------


def norm(x: Any, ord: float | None = None, axis: Any = None, keepdims: bool = False) -> Any:  # noqa: A002
    """`np.linalg.norm`; for a single vector or number, computed as NumPy does: √(x · x)."""
    kind = type(x)
    if axis is None and (ord is None or ord == 2) and not keepdims:
        if kind is np.ndarray and x.dtype is _FLOAT64 and x.ndim == 1 and x.flags.c_contiguous:
            return np.float64(math.sqrt(x.dot(x)))
        if kind is np.float64 and ord is None:
            return np.float64(math.sqrt(x * x))
    return np.linalg.norm(x, ord, axis, keepdims)


def tolerance(
    x: Any,
    bounds: tuple[float, float] = (0.0, 0.0),
    margin: Any = 0.0,
    sigmoid: str = "gaussian",
    value_at_margin: float = 0.1,
) -> Any:
    """`reward_utils.tolerance` for a scalar and the two sigmoids that the tasks use.

    Only the square uses NumPy: the last bit depends on whether NumPy multiplies or calls pow.
    """
    lower, upper = bounds
    long_tail = sigmoid == "long_tail"
    if (
        (type(x) is float or type(x) is np.float64)
        and (long_tail or sigmoid == "gaussian")
        and value_at_margin == 0.1
        and margin >= 0
        and lower <= upper
    ):
        if lower <= x <= upper:
            return 1.0
        if margin == 0:
            return 0.0
        # Python floats; a float32 margin is widened first, as in the package's float64 array.
        away = np.float64((lower - float(x) if x < lower else float(x) - upper) / float(margin))
        if long_tail:
            return float(1 / ((away * _LONG_TAIL) ** 2 + 1))
        return float(np.exp(-0.5 * (away * _GAUSSIAN) ** 2))
    return reward_utils.tolerance(x, bounds, margin, sigmoid, value_at_margin)


_LONG_TAIL, _GAUSSIAN = np.sqrt(1 / 0.1 - 1), np.sqrt(-2 * np.log(0.1))


class Rotation:
    """SciPy's `Rotation.from_matrix(m).as_quat()` for one matrix."""

    __slots__ = ("_quat",)

    def __init__(self, quat: Any) -> None:
        self._quat = quat

    @staticmethod
    def from_matrix(matrix: Any) -> Any:
        """Convert a rotation matrix; any other matrix goes to SciPy, which orthogonalises or rejects it."""
        (a, b, c), (d, e, f), (g, h, i) = matrix.tolist()
        if not (
            # SciPy's limits are 1e-12, and 1e-5 on the diagonal; MuJoCo's matrices stay under 1e-15.
            abs(a * d + b * e + c * f) < 1e-13
            and abs(a * g + b * h + c * i) < 1e-13
            and abs(d * g + e * h + f * i) < 1e-13
            and abs(a * a + b * b + c * c - 1) < 1e-6
            and abs(d * d + e * e + f * f - 1) < 1e-6
            and abs(g * g + h * h + i * i - 1) < 1e-6
            and a * (e * i - f * h) - b * (d * i - f * g) + c * (d * h - e * g) > 0.5
        ):
            return SciPyRotation.from_matrix(matrix)
        trace, largest = a + e + i, max(a, e, i)
        if trace > largest:
            x, y, z, w = h - f, c - g, d - b, 1 + trace
        elif a == largest:
            x, y, z, w = 1 - trace + 2 * a, d + b, g + c, h - f
        elif e == largest:
            x, y, z, w = d + b, 1 - trace + 2 * e, h + f, c - g
        else:
            x, y, z, w = g + c, h + f, 1 - trace + 2 * i, d - b
        length = math.sqrt(x * x + y * y + z * z + w * w)
        return Rotation(np.array((x / length, y / length, z / length, w / length)))

    def as_quat(self) -> Any:
        """x, y, z, w."""
        return self._quat


@cache
def _scipy_agrees() -> bool:
    """Whether the installed SciPy gives the same bits on every branch of the formula."""
    quats = np.random.default_rng(0).normal(size=(64, 4))
    matrices = SciPyRotation.from_quat([*quats, *np.eye(4), [1, 1, 0, 0], [0, 1, 1, 0], [1, 0, 1, 0]]).as_matrix()
    return all(
        SciPyRotation.from_matrix(matrix).as_quat().tobytes() == Rotation.from_matrix(matrix).as_quat().tobytes()
        for matrix in matrices
    )


# -- names -----------------------------------------------------------------------------------------------------------


class _Views(dict[str, Any]):
    """Caches `data.body(name)` and the like by name; the arrays are views of MuJoCo's."""

    def __init__(self, look_up: Callable[[str], Any]) -> None:
        self._look_up = look_up

    def __missing__(self, name: str) -> SimpleNamespace:
        view = self._look_up(name)
        shown = {
            field: getattr(view, field) for field in ("id", "xpos", "xmat", "xquat", "qpos") if hasattr(view, field)
        }
        self[name] = SimpleNamespace(**shown)
        return self[name]


class _CachedViews:
    """Replaces `self.data` in functions that read it."""

    def __init__(self, data: Any) -> None:
        self._data = data
        self.mocap_pos, self.mocap_quat, self.ctrl = data.mocap_pos[0], data.mocap_quat, data.ctrl
        self.body, self.site = _Views(data.body).__getitem__, _Views(data.site).__getitem__
        self.geom, self.joint = _Views(data.geom).__getitem__, _Views(data.joint).__getitem__
        self.pads = self.geom("leftpad_geom").id, self.geom("rightpad_geom").id
        self.hand = self.body("hand").xpos
        self.claws = self.body("rightclaw").xpos, self.body("leftclaw").xpos
        self.fingers = self.site("rightEndEffector").xpos, self.site("leftEndEffector").xpos

    def __getattr__(self, name: str) -> Any:
        return getattr(self._data, name)


# -- one task's class ------------------------------------------------------------------------------------------------


@cache
def _fast_class(kind: Any) -> Any:
    """Return a subclass of `kind` with faster base-class methods and its own functions on replaced globals."""
    fast = type(kind.__name__, (_Fast, kind), {"__module__": kind.__module__, "_starts": {}})
    swaps = [(np, _NUMPY), (reward_utils, _REWARDS), (reward_utils.tolerance, tolerance), (kind, fast)]
    swaps += [(SciPyRotation, Rotation)] if _scipy_agrees() else []
    swapped = {id(old): new for old, new in swaps}
    names = {name: swapped.get(id(old), old) for name, old in vars(sys.modules[kind.__module__]).items()}
    for name, member in vars(kind).items():
        # Only functions that read; those that move objects (reset_model, _set_obj_xyz) stay the same.
        if name in ("compute_reward", "_gripper_caging_reward") or name.startswith("_get_"):
            setattr(fast, name, _with_globals(member, names))
        elif name.startswith("_reward_"):
            setattr(fast, name, staticmethod(_with_globals(member.__func__, names)))
        elif name == "evaluate_state":
            guarded = sawyer.SawyerXYZEnv._Decorators.assert_task_is_set
            setattr(fast, name, guarded(_with_globals(member.__closure__[0].cell_contents, names)))
    return fast


def _with_globals(function: FunctionType, names: dict[str, Any]) -> FunctionType:
    """Return the same code with other globals and `self._named` instead of `self.data`."""
    code = function.__code__
    code = code.replace(co_names=tuple("_named" if name == "data" else name for name in code.co_names))
    return FunctionType(code, names, function.__name__, function.__defaults__, function.__closure__)


def _patched_module(module: ModuleType, **other: Any) -> ModuleType:
    """Return a copy of `module` with a few names replaced."""
    new = ModuleType(module.__name__)
    vars(new).update(vars(module), **other)
    return new


_NUMPY = _patched_module(np, clip=_clip, linalg=_patched_module(np.linalg, norm=norm))
_REWARDS = _patched_module(reward_utils, tolerance=tolerance)


@dataclass(frozen=True)
class _Start:
    """The complete state after a reset to one goal."""

    observation: Any
    state: Any
    body_pos: Any  # of the model; a reset moves fixed objects
    site_pos: Any
    attributes: dict[str, Any]
    aliases: dict[str, tuple[str, int]]  # attributes that are views of mjData: (field, row)


class _Fast(sawyer.SawyerXYZEnv):
    """Faster versions of the methods that tasks inherit; see the package for documentation."""

    _starts: dict[Any, _Start]  # by goal, shared by all environments of a task in this process
    _named: _CachedViews
    _prev_obs: Any

    def get_endeff_pos(self) -> Any:
        return self._named.hand

    def get_body_com(self, body_name: str) -> Any:
        return self._named.body(body_name).xpos

    def _get_site_pos(self, site_name: str) -> Any:
        return self._named.site(site_name).xpos.copy()

    @property
    def tcp_center(self) -> Any:
        right, left = self._named.fingers
        return (right + left) / 2.0

    def touching_object(self, object_geom_id: int) -> bool:
        contact = self.data.contact
        left_pad, right_pad = self._named.pads
        left = right = 0.0
        for pair, address in zip(contact.geom.tolist(), contact.efc_address.tolist()):
            if object_geom_id in pair:
                if left_pad in pair:
                    left += self.data.efc_force[address]
                if right_pad in pair:
                    right += self.data.efc_force[address]
        return left > 0 and right > 0

    def _get_curr_obs_combined_no_goal(self) -> Any:
        named = self._named
        obs = np.zeros(18)  # hand, gripper, then position and quaternion of up to two objects
        obs[:3] = named.hand
        right, left = named.claws
        opening = norm(right - left) / 0.1
        obs[3] = 1.0 if opening > 1.0 else opening
        pos, quat = self._get_pos_objects(), self._get_quat_objects()
        obs[4:7], obs[7:11] = pos[:3], quat[:4]
        if len(pos) > 3:
            obs[11:14], obs[14:18] = pos[3:], quat[4:]
        return obs

    def _get_obs(self) -> Any:
        obs = np.empty(39)
        obs[:18] = current = self._get_curr_obs_combined_no_goal()
        obs[18:36] = self._prev_obs
        obs[36:] = 0.0 if self._partially_observable else self._get_pos_goal()
        self._prev_obs = current
        return obs

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        if not self._set_task_called or self._did_see_sim_exception or len(action) != 4:
            return super().step(action)
        model, data, named = self.model, self.data, self._named
        hand = named.mocap_pos
        _clip(hand + _clip(action[:3], -1, 1) * self.action_scale, self.mocap_low, self.mocap_high, hand)
        named.mocap_quat[:] = _HAND_DOWN
        if self.curr_path_length >= self.max_path_length:
            raise ValueError("You must reset the env manually once truncate==True")
        named.ctrl[:] = action[-1], -action[-1]
        _mj_step(model, data, self.frame_skip)
        _mj_rne_post_constraint(model, data)
        self.curr_path_length += 1
        for name, pos in self._target_site_config:
            named.site(name).xpos[:] = pos[:3]
        _mj_forward(model, data)
        space = self.sawyer_observation_space
        self._last_stable_obs = obs = _clip(self._get_obs(), space.low, space.high)
        reward, info = self.evaluate_state(obs, action)
        return obs.copy(), reward, False, self.curr_path_length == self.max_path_length, info

    def _gripper_caging_reward(
        self,
        action: Any,
        obj_pos: Any,
        obj_radius: float,
        pad_success_thresh: float,
        object_reach_radius: float,
        xz_thresh: float,
        desired_gripper_effort: float = 1.0,
        high_density: bool = False,
        medium_density: bool = False,
    ) -> Any:
        init_pos, init_tcp = self.obj_init_pos, self.init_tcp
        if high_density and medium_density:
            raise ValueError("Can only be either high_density or medium_density")
        obj_y, init_y = float(obj_pos[1]), float(init_pos[1])
        sides = []
        for pad in ("leftpad", "rightpad"):
            pad_y = float(self._named.body(pad).xpos[1])
            margin = abs(abs(pad_y - init_y) - pad_success_thresh)
            sides.append(tolerance(abs(pad_y - obj_y), (obj_radius, pad_success_thresh), margin, "long_tail"))
        caging_y = hamacher_product(*sides)
        tcp = self.tcp_center
        # Copied, because a dot product over a strided array may be summed in another order.
        away, away_init = (tcp - obj_pos)[::2].copy(), (init_pos - init_tcp)[::2].copy()
        caging_xz = tolerance(norm(away), (0, xz_thresh), norm(away_init) - xz_thresh, "long_tail")
        gripper_closed = min(max(0, action[-1]), desired_gripper_effort) / desired_gripper_effort
        caging = hamacher_product(caging_y, caging_xz)
        caging_and_gripping = hamacher_product(caging, gripper_closed if caging > 0.97 else 0.0)
        if high_density:
            return (caging_and_gripping + caging) / 2
        if medium_density:
            margin = abs(norm(init_pos - init_tcp) - object_reach_radius)
            reach = tolerance(norm(obj_pos - tcp), (0, object_reach_radius), margin, "long_tail")
            return (caging_and_gripping + reach) / 2
        return caging_and_gripping

    # -- a reset -----------------------------------------------------------------------------------------------------

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset, from the cache if the goal was reset to before.

        A reset runs 500 steps of MuJoCo to move the hand, and its result depends only on the goal. Between a reset and
        the first step, `data.xpos` and the like belong to the new state; in the stock package, to the step before it.
        """
        if not self._freeze_rand_vec or self.render_mode == "human" or self._last_rand_vec is None:
            return super().reset(seed, options)
        goal = (self._last_rand_vec.tobytes(), self._partially_observable, self.reward_function_version)
        start = self._starts.get(goal)
        if start is None:
            self._starts[goal] = start = self._reset_and_record()
        else:
            self._restore_start(start)
        return start.observation.copy(), {}

    def _reset_and_record(self) -> _Start:
        assigned: set[str] = set()

        def record(env: Any, name: str, value: Any) -> None:
            assigned.add(name)
            object.__setattr__(env, name, value)

        own = type(self)
        self.__class__ = type(own.__name__, (own,), {"__setattr__": record})
        try:
            observation, _ = super().reset()
        finally:
            self.__class__ = own
        state = np.empty(mujoco.mj_stateSize(self.model, _STATE))
        mujoco.mj_getState(self.model, self.data, state, _STATE)
        values = {name: getattr(self, name) for name in assigned}
        aliases = {name: row for name, value in values.items() if (row := _find_view(self.data, value))}
        attributes = {name: _copied(value) for name, value in values.items() if name not in aliases}
        model = self.model
        return _Start(observation, state, model.body_pos.copy(), model.site_pos.copy(), attributes, aliases)

    def _restore_start(self, start: _Start) -> None:
        self.model.body_pos[:], self.model.site_pos[:] = start.body_pos, start.site_pos
        mujoco.mj_setState(self.model, self.data, start.state, _STATE)
        _mj_forward(self.model, self.data)
        # Again, because mj_forward overwrites the solver's warm start.
        mujoco.mj_setState(self.model, self.data, start.state, _STATE)
        for name, value in start.attributes.items():
            setattr(self, name, _copied(value))
        for name, (field, row) in start.aliases.items():
            setattr(self, name, getattr(self.data, field)[row])


def _find_view(data: Any, value: Any) -> tuple[str, int] | None:
    """Return (field, row) if the array is a view of mjData: some tasks keep a reference to a moving position."""
    if isinstance(value, np.ndarray):
        for field in ("xpos", "site_xpos", "geom_xpos"):
            rows = getattr(data, field)
            if np.may_share_memory(rows, value):
                return field, (value.ctypes.data - rows.ctypes.data) // rows.strides[0]
    return None


def _copied(value: Any) -> Any:
    return value.copy() if isinstance(value, np.ndarray) else value
