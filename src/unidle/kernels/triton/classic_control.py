"""Classic control inside a kernel, with the same formulas as `tasks.classic_control`.

The state of an environment is up to four numbers a, b, c, d, an observation up to six. TASK is a task's name.
"""

from __future__ import annotations

import triton
import triton.language as tl

from unidle.rng import HASH_DRAW, HASH_EPISODE, HASH_FACTORS

_PI = tl.constexpr(3.141592653589793)
_FACTOR1, _FACTOR2 = tl.constexpr(HASH_FACTORS[0]), tl.constexpr(HASH_FACTORS[1])
_EPISODE_SALT, _DRAW_SALT = tl.constexpr(HASH_EPISODE), tl.constexpr(HASH_DRAW)


@triton.jit
def _hash(word):
    """The hash of `envs.device.device_env`, on 32-bit words, which wrap around."""
    word = (word ^ (word >> 16)) * _FACTOR1
    word = (word ^ (word >> 15)) * _FACTOR2
    return word ^ (word >> 15)


@triton.jit
def episode_hash(seed, env, episode):
    """The hash that all draws of an episode derive from; `seed` is already scrambled."""
    return _hash(_hash(env.to(tl.uint32) + seed.to(tl.uint32)) ^ _hash(episode.to(tl.uint32) + _EPISODE_SALT))


@triton.jit
def _uniform(word, DRAW: tl.constexpr):
    """Draw number DRAW (from 1) in [0, 1)."""
    drawn = _hash(word + tl.full((1,), DRAW * _DRAW_SALT & 0xFFFFFFFF, tl.uint32))
    return (drawn >> 8).to(tl.float32) * (1.0 / 16777216)


@triton.jit
def reset_state(word, TASK: tl.constexpr):
    """The state at the start of an episode."""
    if TASK == "cartpole":
        a, b = 0.1 * _uniform(word, 1) - 0.05, 0.1 * _uniform(word, 2) - 0.05
        c, d = 0.1 * _uniform(word, 3) - 0.05, 0.1 * _uniform(word, 4) - 0.05
    elif TASK == "pendulum":
        a, b = (2 * _uniform(word, 1) - 1) * _PI, 2 * _uniform(word, 2) - 1
        c, d = tl.zeros_like(a), tl.zeros_like(a)
    elif TASK == "acrobot":
        a, b = 0.2 * _uniform(word, 1) - 0.1, 0.2 * _uniform(word, 2) - 0.1
        c, d = 0.2 * _uniform(word, 3) - 0.1, 0.2 * _uniform(word, 4) - 0.1
    else:
        a = 0.2 * _uniform(word, 1) - 0.6
        b, c, d = tl.zeros_like(a), tl.zeros_like(a), tl.zeros_like(a)
    return a, b, c, d


@triton.jit
def _wrap_angle(angle):
    """The angle wrapped to [−π, π)."""
    turned = angle + _PI
    return turned - tl.floor(turned / (2 * _PI)) * (2 * _PI) - _PI


@triton.jit
def _clamp(x, limit):
    return tl.minimum(tl.maximum(x, -limit), limit)


@triton.jit
def _acrobot_derivatives(theta1, theta2, speed1, speed2, torque):
    gravity = 9.8
    cos2, sin2 = tl.cos(theta2), tl.sin(theta2)
    d1 = 0.25 + (1.25 + cos2) + 2.0
    d2 = 0.25 + 0.5 * cos2 + 1.0
    phi2 = 0.5 * gravity * tl.cos(theta1 + theta2 - _PI / 2)
    phi1 = -0.5 * speed2 * speed2 * sin2 - speed2 * speed1 * sin2 + 1.5 * gravity * tl.cos(theta1 - _PI / 2) + phi2
    accelerate2 = (torque + d2 / d1 * phi1 - 0.5 * speed1 * speed1 * sin2 - phi2) / (1.25 - d2 * d2 / d1)
    return speed1, speed2, -(d2 * accelerate2 + phi1) / d1, accelerate2


@triton.jit
def step(a, b, c, d, action, TASK: tl.constexpr):
    """The next state, the reward, and whether the episode terminates."""
    if TASK == "cartpole":
        force = tl.where(action > 0.5, 10.0, -10.0)
        cos, sin = tl.cos(c), tl.sin(c)
        temp = (force + 0.05 * d * d * sin) / 1.1
        theta_acc = (9.8 * sin - cos * temp) / (0.5 * (4.0 / 3.0 - 0.1 * cos * cos / 1.1))
        x_acc = temp - 0.05 * theta_acc * cos / 1.1
        a, b, c, d = a + 0.02 * b, b + 0.02 * x_acc, c + 0.02 * d, d + 0.02 * theta_acc
        terminated = (tl.abs(a) > 2.4) | (tl.abs(c) > 24 * _PI / 360)
        reward = tl.full(a.shape, 1.0, tl.float32)
    elif TASK == "pendulum":
        torque = _clamp(action, 2.0)
        theta = _wrap_angle(a)
        reward = -(theta * theta + 0.1 * b * b + 0.001 * torque * torque)
        b = _clamp(b + (15.0 * tl.sin(a) + 3.0 * torque) * 0.05, 8.0)
        a += b * 0.05
        terminated = tl.zeros_like(a) > 0
    elif TASK == "acrobot":
        torque = action - 1.0
        p1, q1, r1, s1 = _acrobot_derivatives(a, b, c, d, torque)
        p2, q2, r2, s2 = _acrobot_derivatives(a + 0.1 * p1, b + 0.1 * q1, c + 0.1 * r1, d + 0.1 * s1, torque)
        p3, q3, r3, s3 = _acrobot_derivatives(a + 0.1 * p2, b + 0.1 * q2, c + 0.1 * r2, d + 0.1 * s2, torque)
        p4, q4, r4, s4 = _acrobot_derivatives(a + 0.2 * p3, b + 0.2 * q3, c + 0.2 * r3, d + 0.2 * s3, torque)
        a = _wrap_angle(a + 0.2 / 6 * (p1 + 2 * p2 + 2 * p3 + p4))
        b = _wrap_angle(b + 0.2 / 6 * (q1 + 2 * q2 + 2 * q3 + q4))
        c = _clamp(c + 0.2 / 6 * (r1 + 2 * r2 + 2 * r3 + r4), 4 * _PI)
        d = _clamp(d + 0.2 / 6 * (s1 + 2 * s2 + 2 * s3 + s4), 9 * _PI)
        terminated = -tl.cos(a) - tl.cos(a + b) > 1.0
        reward = terminated.to(tl.float32) - 1.0
    else:
        push, goal = (action - 1.0) * 0.001, 0.5
        if TASK == "continuous mountain car":
            push, goal = _clamp(action, 1.0) * 0.0015, 0.45
        b = _clamp(b + push - 0.0025 * tl.cos(3 * a), 0.07)
        a = tl.minimum(tl.maximum(a + b, -1.2), 0.6)
        b = tl.where((a <= -1.2) & (b < 0), 0.0, b)
        terminated = (a >= goal) & (b >= 0)
        reward = tl.full(a.shape, -1.0, tl.float32)
        if TASK == "continuous mountain car":
            reward = 100.0 * terminated.to(tl.float32) - 0.1 * action * action
    return a, b, c, d, reward, terminated


@triton.jit
def observation(a, b, c, d, COLUMNS: tl.constexpr, TASK: tl.constexpr):
    """The observation [.., COLUMNS], 0 in unused columns."""
    column = tl.arange(0, COLUMNS)[None, :]
    if TASK == "pendulum":
        o0, o1, o2, o3, o4, o5 = tl.cos(a), tl.sin(a), b, c, c, c
    elif TASK == "acrobot":
        o0, o1, o2, o3, o4, o5 = tl.cos(a), tl.sin(a), tl.cos(b), tl.sin(b), c, d
    else:
        o0, o1, o2, o3, o4, o5 = a, b, c, d, tl.zeros_like(a), tl.zeros_like(a)
    obs = tl.where(column == 0, o0[:, None], 0.0)
    obs = tl.where(column == 1, o1[:, None], obs)
    obs = tl.where(column == 2, o2[:, None], obs)
    obs = tl.where(column == 3, o3[:, None], obs)
    obs = tl.where(column == 4, o4[:, None], obs)
    return tl.where(column == 5, o5[:, None], obs)
