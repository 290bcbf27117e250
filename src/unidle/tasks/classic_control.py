"""Gymnasium's classic control on tensors, batched: the same physics, rewards, termination and time limits.

Each task is a few functions of `physics` [N, ..]; `Classic` turns them into an environment with automatic resets.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from unidle.envs.device.device_env import State, Step, uniform


@dataclass(frozen=True)
class Task:
    """The functions and constants of one task."""

    name: str
    observation_space: spaces.Box
    action_space: spaces.Space
    limit: int  # steps of an episode
    draws: int  # random numbers per reset
    begin: Callable[[Tensor], Tensor]  # uniform numbers [N, draws] → physics
    advance: Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]  # physics, action [N] → physics, reward, ended
    observe: Callable[[Tensor], Tensor]  # physics → observation


class Classic:
    """N environments of one task."""

    def __init__(
        self, task: Task, n_envs: int, seed: int, device: torch.device | str = "cpu", first_index: int = 0
    ) -> None:
        self.task, self.seed, self.n_envs = task, seed, n_envs
        self.observation_space, self.action_space = task.observation_space, task.action_space
        self.episode_limit = task.limit
        self.indices = torch.arange(first_index, first_index + n_envs, device=device)

    def begin(self) -> tuple[State, Tensor]:
        """Return the state and observation at the start of episode 0 of every environment."""
        zeros = torch.zeros_like(self.indices)
        physics = self._reset_one(zeros)
        return {"physics": physics, "episode": zeros, "length": zeros.clone()}, self.task.observe(physics)

    def _reset_one(self, episode: Tensor) -> Tensor:
        return self.task.begin(uniform(self.seed, self.indices, episode, self.task.draws))

    def step(self, state: State, action: Tensor) -> tuple[State, Step]:
        """Step with flat actions [N, 1]."""
        task = self.task
        physics, reward, terminated = task.advance(state["physics"], action[:, 0])
        length = state["length"] + 1
        truncated = (length >= task.limit) & ~terminated
        ended = terminated | truncated
        final = task.observe(physics)
        episode = state["episode"] + ended
        physics = torch.where(ended.unsqueeze(-1), self._reset_one(episode), physics)
        state = {"physics": physics, "episode": episode, "length": torch.where(ended, 0, length)}
        observation = torch.where(ended.unsqueeze(-1), task.observe(physics), final)
        return state, Step(observation, final, reward, terminated, truncated)


def _box(high: list[float]) -> spaces.Box:
    bound = np.array(high, np.float32)
    return spaces.Box(-bound, bound, dtype=np.float32)


# -- CartPole (Barto, Sutton, Anderson 1983) ---------------------------------------------------------------------------

_POLE_ANGLE, _CART_POSITION = 12 * 2 * math.pi / 360, 2.4


def _cartpole_advance(physics: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    gravity, pole_mass, total_mass, half_length, tau = 9.8, 0.1, 1.1, 0.5, 0.02
    x, x_dot, theta, theta_dot = physics.unbind(-1)
    force = torch.where(action > 0.5, 10.0, -10.0)
    cos, sin = torch.cos(theta), torch.sin(theta)
    pushed = (force + pole_mass * half_length * theta_dot.square() * sin) / total_mass
    turning = (gravity * sin - cos * pushed) / (half_length * (4.0 / 3.0 - pole_mass * cos.square() / total_mass))
    moving = pushed - pole_mass * half_length * turning * cos / total_mass
    physics = torch.stack(
        (x + tau * x_dot, x_dot + tau * moving, theta + tau * theta_dot, theta_dot + tau * turning), -1
    )
    ended = (physics[:, 0].abs() > _CART_POSITION) | (physics[:, 2].abs() > _POLE_ANGLE)
    return physics, torch.ones_like(x), ended


CARTPOLE = Task(
    name="cartpole",
    observation_space=_box([2 * _CART_POSITION, np.inf, 2 * _POLE_ANGLE, np.inf]),
    action_space=spaces.Discrete(2),
    limit=500,
    draws=4,
    begin=lambda u: 0.1 * u - 0.05,
    advance=_cartpole_advance,
    observe=lambda physics: physics,
)


# -- Pendulum ----------------------------------------------------------------------------------------------------------


def _pendulum_advance(physics: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    gravity, dt = 10.0, 0.05
    theta, speed = physics.unbind(-1)
    torque = action.clamp(-2.0, 2.0)
    upright = torch.remainder(theta + math.pi, 2 * math.pi) - math.pi
    cost = upright.square() + 0.1 * speed.square() + 0.001 * torque.square()
    speed = (speed + (1.5 * gravity * torch.sin(theta) + 3.0 * torque) * dt).clamp(-8.0, 8.0)
    return torch.stack((theta + speed * dt, speed), -1), -cost, torch.zeros_like(theta, dtype=torch.bool)


def _pendulum_observe(physics: Tensor) -> Tensor:
    theta, speed = physics.unbind(-1)
    return torch.stack((torch.cos(theta), torch.sin(theta), speed), -1)


PENDULUM = Task(
    name="pendulum",
    observation_space=_box([1.0, 1.0, 8.0]),
    action_space=spaces.Box(-2.0, 2.0, (1,), np.float32),
    limit=200,
    draws=2,
    begin=lambda u: torch.stack(((2 * u[:, 0] - 1) * math.pi, 2 * u[:, 1] - 1), -1),
    advance=_pendulum_advance,
    observe=_pendulum_observe,
)


# -- Acrobot (Sutton & Barto's book, fourth-order Runge-Kutta) ---------------------------------------------------------


def _acrobot_slope(physics: Tensor, torque: Tensor) -> Tensor:
    # Both links: mass 1, length 1, centre of mass at 0.5, moment of inertia 1.
    gravity = 9.8
    theta1, theta2, speed1, speed2 = physics.unbind(-1)
    cos2, sin2 = torch.cos(theta2), torch.sin(theta2)
    d1 = 0.25 + (1.25 + cos2) + 2.0
    d2 = 0.25 + 0.5 * cos2 + 1.0
    phi2 = 0.5 * gravity * torch.cos(theta1 + theta2 - math.pi / 2)
    phi1 = (
        -0.5 * speed2.square() * sin2 - speed2 * speed1 * sin2 + 1.5 * gravity * torch.cos(theta1 - math.pi / 2) + phi2
    )
    accelerate2 = (torque + d2 / d1 * phi1 - 0.5 * speed1.square() * sin2 - phi2) / (1.25 - d2.square() / d1)
    accelerate1 = -(d2 * accelerate2 + phi1) / d1
    return torch.stack((speed1, speed2, accelerate1, accelerate2), -1)


def _acrobot_advance(physics: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dt, torque = 0.2, action - 1.0
    k1 = _acrobot_slope(physics, torque)
    k2 = _acrobot_slope(physics + dt / 2 * k1, torque)
    k3 = _acrobot_slope(physics + dt / 2 * k2, torque)
    k4 = _acrobot_slope(physics + dt * k3, torque)
    physics = physics + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
    angles = torch.remainder(physics[:, :2] + math.pi, 2 * math.pi) - math.pi
    speed1 = physics[:, 2].clamp(-4 * math.pi, 4 * math.pi)
    speed2 = physics[:, 3].clamp(-9 * math.pi, 9 * math.pi)
    ended = -torch.cos(angles[:, 0]) - torch.cos(angles[:, 0] + angles[:, 1]) > 1.0
    return torch.cat((angles, speed1.unsqueeze(-1), speed2.unsqueeze(-1)), -1), ended.float() - 1.0, ended


def _acrobot_observe(physics: Tensor) -> Tensor:
    angles, speeds = physics[:, :2], physics[:, 2:]
    turned = torch.stack((torch.cos(angles), torch.sin(angles)), -1)
    return torch.cat((turned.flatten(1), speeds), -1)


ACROBOT = Task(
    name="acrobot",
    observation_space=_box([1.0, 1.0, 1.0, 1.0, 4 * math.pi, 9 * math.pi]),
    action_space=spaces.Discrete(3),
    limit=500,
    draws=4,
    begin=lambda u: 0.2 * u - 0.1,
    advance=_acrobot_advance,
    observe=_acrobot_observe,
)


# -- MountainCar (Moore 1990) ------------------------------------------------------------------------------------------


def _drive(physics: Tensor, push: Tensor, goal: float) -> tuple[Tensor, Tensor]:
    """Advance the car one step; return its physics and whether it is at the goal."""
    position, speed = physics.unbind(-1)
    speed = (speed + push - 0.0025 * torch.cos(3 * position)).clamp(-0.07, 0.07)
    position = (position + speed).clamp(-1.2, 0.6)
    speed = torch.where((position <= -1.2) & (speed < 0), 0.0, speed)
    return torch.stack((position, speed), -1), (position >= goal) & (speed >= 0)


def _mountain_car_advance(physics: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    physics, ended = _drive(physics, (action - 1.0) * 0.001, 0.5)
    return physics, torch.full_like(action, -1.0), ended


def _continuous_mountain_car_advance(physics: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    physics, ended = _drive(physics, action.clamp(-1.0, 1.0) * 0.0015, 0.45)
    return physics, 100.0 * ended.float() - 0.1 * action.square(), ended


def _mountain_car(
    name: str, action_space: spaces.Space, limit: int, advance: Callable[..., tuple[Tensor, Tensor, Tensor]]
) -> Task:
    return Task(
        name=name,
        observation_space=spaces.Box(np.array([-1.2, -0.07], np.float32), np.array([0.6, 0.07], np.float32)),
        action_space=action_space,
        limit=limit,
        draws=1,
        begin=lambda u: torch.cat((0.2 * u - 0.6, torch.zeros_like(u)), -1),
        advance=advance,
        observe=lambda physics: physics,
    )


MOUNTAIN_CAR = _mountain_car("mountain car", spaces.Discrete(3), 200, _mountain_car_advance)
CONTINUOUS_MOUNTAIN_CAR = _mountain_car(
    "continuous mountain car", spaces.Box(-1.0, 1.0, (1,), np.float32), 999, _continuous_mountain_car_advance
)

TASKS = {
    "unidle/CartPole-v1": CARTPOLE,
    "unidle/Pendulum-v1": PENDULUM,
    "unidle/Acrobot-v1": ACROBOT,
    "unidle/MountainCar-v0": MOUNTAIN_CAR,
    "unidle/MountainCarContinuous-v0": CONTINUOUS_MOUNTAIN_CAR,
}
