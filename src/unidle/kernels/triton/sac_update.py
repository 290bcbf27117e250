"""One SAC update for continuous actions in about 65 kernels instead of 250.

The formulas are those of algos/sac.py, differentiated by hand. mlp.py runs the networks forwards and backwards,
task_heads.py the critics' output layers, adam.py the optimiser steps. This file has the rest: actions and their
log-probabilities, targets and losses, and the temperature. The policy acts on next and current observations in one
pass, because its weights are the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from unidle.kernels.triton.adam import AdamState, FusedAdam, adam, beta_constants
from unidle.kernels.triton.mlp import BatchedGradient, BatchedMlp, SideStream
from unidle.kernels.triton.small_mlp import activated
from unidle.kernels.triton.task_heads import TaskHeads, task_of
from unidle.spaces.distributions import LOG_SQRT_2PI

_ROWS = 32  # transitions per program
_LOG_SQRT_2PI, _LOG_2 = tl.constexpr(LOG_SQRT_2PI), tl.constexpr(math.log(2))
_FIGURES = tl.constexpr(4)  # logged sums: critic loss, mean Q, actor loss, entropy


@triton.jit
def _write_inputs(
    obs, next_obs, actions, inputs, tasks,
    B: tl.constexpr, ROW: tl.constexpr, SEEN: tl.constexpr, SEEN_UP: tl.constexpr, REALS: tl.constexpr,
    REALS_UP: tl.constexpr, WIDTH: tl.constexpr, TASKS: tl.constexpr, TASKS_UP: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Write the networks' inputs [3 B, WIDTH]: next observations, observations, observations with their actions."""
    sample = tl.program_id(0) * BM + tl.arange(0, BM)
    inside = (sample < B)[:, None]
    column = tl.arange(0, SEEN_UP)[None, :]
    seen = inside & (column < SEEN)
    after = tl.load(next_obs + sample[:, None] * ROW + column, mask=seen)
    before = tl.load(obs + sample[:, None] * ROW + column, mask=seen)
    tl.store(inputs + sample[:, None] * WIDTH + column, after, mask=seen)
    tl.store(inputs + (B + sample)[:, None] * WIDTH + column, before, mask=seen)
    tl.store(inputs + (2 * B + sample)[:, None] * WIDTH + column, before, mask=seen)
    real = tl.arange(0, REALS_UP)[None, :]
    action = tl.load(actions + sample[:, None] * REALS + real, mask=inside & (real < REALS))
    tl.store(inputs + (2 * B + sample)[:, None] * WIDTH + SEEN + real, action, mask=inside & (real < REALS))
    if TASKS > 1:
        place = tl.arange(0, TASKS_UP)[None, :]
        one_hot = tl.load(
            obs + sample[:, None] * ROW + SEEN - TASKS + place, mask=inside & (place < TASKS), other=-float("inf")
        )
        tl.store(tasks + sample, tl.argmax(one_hot, 1), mask=sample < B)


@triton.jit
def _alpha(log_alpha, task):
    return tl.exp(tl.load(log_alpha + task))


@triton.jit
def _sample_actions(
    outputs, bias, noise, tasks, inputs, log_probs,
    B: tl.constexpr, REALS: tl.constexpr, REALS_UP: tl.constexpr, SEEN: tl.constexpr, WIDTH: tl.constexpr,
    TASKS: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Sample actions for the first 2 B rows of `inputs` from the policy's outputs [2 B, TASKS × 2 REALS]."""
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    inside = row < 2 * B
    task = task_of(tasks, row % B, inside, TASKS)
    real = tl.arange(0, REALS_UP)[None, :]
    valid = inside[:, None] & (real < REALS)
    place = task[:, None] * 2 * REALS + real
    at = row[:, None] * (TASKS * 2 * REALS) + place
    mean = tl.load(outputs + at, mask=valid, other=0.0) + tl.load(bias + place, mask=valid, other=0.0)
    log_std = tl.load(outputs + at + REALS, mask=valid, other=0.0)
    log_std += tl.load(bias + place + REALS, mask=valid, other=0.0)
    log_std = tl.minimum(tl.maximum(log_std, LOW, tl.PropagateNan.ALL), HIGH, tl.PropagateNan.ALL)
    drawn = tl.load(noise + row[:, None] * REALS + real, mask=valid, other=0.0)
    u = mean + tl.exp(log_std) * drawn
    tl.store(inputs + row[:, None] * WIDTH + SEEN + real, activated(u, "tanh"), mask=valid)
    soft_plus = tl.maximum(-2.0 * u, 0.0, tl.PropagateNan.ALL) + tl.log(1.0 + tl.exp(-tl.abs(2.0 * u)))
    log_slope = 2.0 * (_LOG_2 - u - soft_plus)  # log(1 − tanh² u)
    each = -0.5 * drawn * drawn - log_std - _LOG_SQRT_2PI - log_slope
    tl.store(log_probs + row, tl.sum(tl.where(valid, each, 0.0), 1), mask=inside)


@triton.jit
def _value(values, member, sample, inside, B: tl.constexpr):
    """Load the values of one critic."""
    return tl.load(values + member * B + sample, mask=inside, other=0.0)


@triton.jit
def _minimum(values, sample, inside, E: tl.constexpr, B: tl.constexpr):
    """Take the minimum over the critics."""
    least = _value(values, 0, sample, inside, B)
    for member in tl.static_range(1, E):
        least = tl.minimum(least, _value(values, member, sample, inside, B), tl.PropagateNan.ALL)
    return least


@triton.jit
def _clipped(values, LIMIT: tl.constexpr):
    """Clip values to ±LIMIT."""
    return tl.minimum(tl.maximum(values, -LIMIT, tl.PropagateNan.ALL), LIMIT, tl.PropagateNan.ALL)


@triton.jit
def _critic_loss(
    next_values, values, tasks, returns, discounts, weights, log_probs, log_alpha, slopes, errors, figures,
    LIMIT: tl.constexpr, E: tl.constexpr, B: tl.constexpr, TASKS: tl.constexpr, TASKS_UP: tl.constexpr,
    BM: tl.constexpr,
):  # fmt: skip
    """Compute the critic loss and its gradient with respect to their values [E, B]."""
    sample = tl.program_id(0) * BM + tl.arange(0, BM)
    inside = sample < B
    task = task_of(tasks, sample, inside, TASKS)
    soft = _minimum(next_values, sample, inside, E, B)
    soft -= _alpha(log_alpha, task) * tl.load(log_probs + sample, mask=inside, other=0.0)
    target = tl.load(returns + sample, mask=inside, other=0.0)
    target += tl.load(discounts + sample, mask=inside, other=0.0) * soft
    target = _clipped(target, LIMIT)
    weight = tl.load(weights + sample, mask=inside, other=0.0)
    off, loss, total = tl.zeros_like(target), tl.zeros_like(target), tl.zeros_like(target)
    for member in tl.static_range(E):
        q = _value(values, member, sample, inside, B)
        value = _clipped(q, LIMIT)
        error = value - target
        tl.store(slopes + member * B + sample, tl.where(tl.abs(q) > LIMIT, 0.0, weight * error / B), mask=inside)
        off += tl.abs(error)
        loss += 0.5 * weight * error * error
        total += value
    tl.store(errors + sample, off / E, mask=inside)
    own = figures + tl.program_id(0) * (_FIGURES + TASKS_UP)
    tl.store(own, tl.sum(tl.where(inside, loss, 0.0)) / B)
    tl.store(own + 1, tl.sum(tl.where(inside, total, 0.0)) / (E * B))


@triton.jit
def _actor_loss(
    values, tasks, weights, log_probs, log_alpha, slopes, figures,
    ENTROPY: tl.constexpr, E: tl.constexpr, B: tl.constexpr, TASKS: tl.constexpr, TASKS_UP: tl.constexpr,
    BM: tl.constexpr,
):  # fmt: skip
    """Compute the actor loss, its gradient with respect to the critics' values, and the gradient of log α."""
    sample = tl.program_id(0) * BM + tl.arange(0, BM)
    inside = sample < B
    task = task_of(tasks, sample, inside, TASKS)
    counts = (tl.load(weights + sample, mask=inside, other=0.0) > 0).to(tl.float32)
    least = _minimum(values, sample, inside, E, B)
    equal = tl.zeros_like(least)
    for member in tl.static_range(E):
        equal += (_value(values, member, sample, inside, B) == least).to(tl.float32)
    for member in tl.static_range(E):
        is_least = _value(values, member, sample, inside, B) == least
        tl.store(slopes + member * B + sample, tl.where(is_least, -counts / (equal * B), 0.0), mask=inside)
    log_prob = tl.load(log_probs + B + sample, mask=inside, other=0.0)
    loss = counts * (_alpha(log_alpha, task) * log_prob - least)
    own = figures + tl.program_id(0) * (_FIGURES + TASKS_UP)
    tl.store(own + 2, tl.sum(tl.where(inside, loss, 0.0)) / B)
    tl.store(own + 3, -tl.sum(log_prob) / B)
    head = tl.arange(0, TASKS_UP)
    slope = tl.where(inside, -counts * (log_prob + ENTROPY) / B, 0.0)
    tl.store(own + _FIGURES + head, tl.sum(tl.where(head[None, :] == task[:, None], slope[:, None], 0.0), 0))


@triton.jit
def _actor_gradient(
    by_actions, outputs, bias, noise, tasks, weights, inputs, log_alpha, by_outputs,
    E: tl.constexpr, B: tl.constexpr, REALS: tl.constexpr, SEEN: tl.constexpr, WIDTH: tl.constexpr,
    TASKS: tl.constexpr, OUTS_UP: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Turn gradients of actions [E, B, REALS] into gradients of the policy's outputs [B, TASKS × 2 REALS]."""
    sample = tl.program_id(0) * BM + tl.arange(0, BM)
    inside = sample < B
    task = task_of(tasks, sample, inside, TASKS)
    column = tl.arange(0, OUTS_UP)[None, :]
    own = inside[:, None] & (column // (2 * REALS) == task[:, None])
    is_std = column % (2 * REALS) >= REALS
    real = column % REALS
    by_action = tl.zeros((BM, OUTS_UP), tl.float32)
    for member in tl.static_range(E):
        by_action += tl.load(by_actions + (member * B + sample)[:, None] * REALS + real, mask=own, other=0.0)
    row = B + sample
    action = tl.load(inputs + row[:, None] * WIDTH + SEEN + real, mask=own, other=0.0)
    drawn = tl.load(noise + row[:, None] * REALS + real, mask=own, other=0.0)
    place = task[:, None] * 2 * REALS + REALS + real
    log_std = tl.load(outputs + row[:, None] * (TASKS * 2 * REALS) + place, mask=own, other=0.0)
    log_std += tl.load(bias + place, mask=own, other=0.0)
    counts = (tl.load(weights + sample, mask=inside, other=0.0) > 0).to(tl.float32)
    by_log_prob = (counts * _alpha(log_alpha, task) / B)[:, None]
    by_u = by_action * (1.0 - action * action) + by_log_prob * 2.0 * action
    by_log_std = by_u * drawn * tl.exp(log_std) - by_log_prob
    by_log_std = tl.where((log_std < LOW) | (log_std > HIGH), 0.0, by_log_std)
    slope = tl.where(own, tl.where(is_std, by_log_std, by_u), 0.0)
    tl.store(
        by_outputs + sample[:, None] * (TASKS * 2 * REALS) + column,
        slope,
        mask=inside[:, None] & (column < TASKS * 2 * REALS),
    )


@triton.jit
def _finish(
    figures, sums, grad, log_alpha, means, mean_squares, steps, learning_rate,
    BLOCKS: tl.constexpr, TASKS: tl.constexpr, TASKS_UP: tl.constexpr, AUTO: tl.constexpr,
    LOG_BETA1: tl.constexpr, LOG_BETA2: tl.constexpr, BETA1: tl.constexpr, BETA2: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Sum the metrics of all programs, in order, and step the temperature."""
    figure, head = tl.arange(0, _FIGURES), tl.arange(0, TASKS_UP)
    logged, slope = tl.zeros((_FIGURES,), tl.float32), tl.zeros((TASKS_UP,), tl.float32)
    for block in range(BLOCKS):
        own = figures + block * (_FIGURES + TASKS_UP)
        logged += tl.load(own + figure)
        slope += tl.load(own + _FIGURES + head)
    tl.store(sums + figure, tl.load(sums + figure) + logged)
    if AUTO:
        inside = head < TASKS
        tl.store(grad + head, slope, mask=inside)
        temperature, mean, square = adam(
            tl.load(log_alpha + head, mask=inside, other=0.0),
            slope,
            tl.load(means + head, mask=inside, other=0.0),
            tl.load(mean_squares + head, mask=inside, other=0.0),
            tl.load(steps),
            tl.load(learning_rate),
            LOG_BETA1, LOG_BETA2, BETA1, BETA2, EPS,
        )  # fmt: skip
        tl.store(log_alpha + head, temperature, mask=inside)
        tl.store(means + head, mean, mask=inside)
        tl.store(mean_squares + head, square, mask=inside)


@dataclass(frozen=True)
class Layers:
    """Weights [E, n, m] and biases [E, m] of each layer of E networks, as views of their parameters or gradients."""

    weights: list[Tensor]
    biases: list[Tensor]


@dataclass(frozen=True)
class SacState:
    """The tensors that an update reads and writes, and its constants."""

    actor: Layers  # of 1 network
    actor_grads: Layers
    critics: Layers
    critic_grads: Layers
    targets: Layers
    targets_flat: Tensor  # all parameters of the target networks
    actor_adam: AdamState
    critics_adam: AdamState
    alpha_adam: AdamState  # of log α [tasks]
    sums: Tensor  # [4] critic loss, mean Q, actor loss, entropy
    batch_size: int
    obs_words: int  # 4-byte words of a packed observation
    n_inputs: int  # of them are inputs
    reals: int
    n_tasks: int
    activation: str
    log_std_range: tuple[float, float]
    target_entropy: float
    learns_alpha: bool
    value_limit: float
    max_grad_norm: float
    tau: float


class SacUpdate:
    """Updates actor, critics, targets and temperature in place, as `SAC.update` does."""

    def __init__(self, state: SacState) -> None:
        self._state, batch, reals = state, state.batch_size, state.reals
        device, seen, members = state.sums.device, state.n_inputs, len(state.critics.weights[0])

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        width = -(-(seen + reals) // 4) * 4  # rows start at multiples of 16 bytes
        self._padded = zeros(3 * batch, width)
        self._tasks = zeros(batch, dtype=torch.int32)
        self._log_probs, self._errors = zeros(2 * batch), zeros(batch)
        blocks, tasks_up = triton.cdiv(batch, _ROWS), triton.next_power_of_2(state.n_tasks)
        self._figures = zeros(blocks, _FIGURES.value + tasks_up)
        outs = 2 * reals * state.n_tasks
        self._by_outputs = zeros(1, batch, outs)  # gradient of the actor's outputs
        self._slopes, self._by_actions = zeros(members, batch), zeros(members, batch, reals)
        self._constants: dict[str, Any] = {
            "B": batch,
            "E": members,
            "BM": _ROWS,
            "ROW": state.obs_words,
            "SEEN": seen,
            "SEEN_UP": triton.next_power_of_2(seen),
            "REALS": reals,
            "REALS_UP": triton.next_power_of_2(reals),
            "WIDTH": width,
            "TASKS": state.n_tasks,
            "TASKS_UP": tasks_up,
            "OUTS_UP": triton.next_power_of_2(outs),
            "LOW": state.log_std_range[0],
            "HIGH": state.log_std_range[1],
            "ENTROPY": state.target_entropy,
            "LIMIT": state.value_limit,
            "BLOCKS": blocks,
            "AUTO": state.learns_alpha,
            "EPS": state.alpha_adam.eps,
            **beta_constants(state.alpha_adam),
        }
        whole = self._padded[:, : seen + reals]
        self._next, self._chosen, self._taken = whole.view(3, batch, -1).expand(members, -1, -1, -1).unbind(1)
        self._seen = whole[None, : 2 * batch, :seen]  # next observations, then current ones
        self._action_columns = slice(seen, seen + reals)

        self._side = SideStream(device)
        self._actor = BatchedMlp(state.actor.weights, state.actor.biases, 2 * batch, state.activation)
        self._critics, self._targets = (
            BatchedMlp(layers.weights[:-1], layers.biases[:-1], batch, state.activation)
            for layers in (state.critics, state.targets)
        )
        self._critic_heads, self._target_heads = (
            TaskHeads(layers.weights[-1], layers.biases[-1], layers.biases[-2], self._tasks, state.activation)
            for layers in (state.critics, state.targets)
        )
        self._actor_back = BatchedGradient(self._actor, self._side, since=batch)
        self._critics_back = BatchedGradient(self._critics, self._side)
        weights, biases = state.critic_grads.weights, state.critic_grads.biases
        self._critic_grads = weights[:-1], [*biases[:-2], None]
        self._head_grads = biases[-2], weights[-1], biases[-1]
        learned = [state.actor_adam, state.critics_adam, *([state.alpha_adam] if state.learns_alpha else [])]
        self._counts = [each.steps for each in learned]
        self.steps = {
            "critics": FusedAdam(state.critics_adam, state.max_grad_norm, state.targets_flat, state.tau),
            "actor": FusedAdam(state.actor_adam, state.max_grad_norm),
        }

    @torch.no_grad()
    def __call__(
        self,
        obs: Tensor,
        actions: Tensor,
        returns: Tensor,
        discounts: Tensor,
        next_obs: Tensor,
        weights: Tensor,
        noise: Tensor,
    ) -> Tensor:
        """Update from a batch (fields of `buffers.replay.Transitions`); returns |TD error| [B] in the same buffer."""
        state, alpha = self._state, self._state.alpha_adam
        torch._foreach_add_(self._counts, 1.0)
        self._run(
            _write_inputs, obs.view(torch.float32), next_obs.view(torch.float32), actions, self._padded, self._tasks
        )
        with self._side():
            products = self._critics.forward(self._taken)
            q = self._critic_heads.forward(products, keep=True)
        outputs, bias = self._actor.forward(self._seen), self._actor.biases[-1]
        self._run(_sample_actions, outputs, bias, noise, self._tasks, self._padded, self._log_probs, programs=2)
        expected = self._target_heads.forward(self._targets.forward(self._next), keep=False)
        self._side.join()
        self._run(_critic_loss, expected, q, self._tasks, returns, discounts, weights, self._log_probs,
                  alpha.flat, self._slopes, self._errors, self._figures)  # fmt: skip
        gradient = self._critic_heads.back(self._slopes, products, self._head_grads)
        self._critics_back.by_parameters(self._taken, gradient, *self._critic_grads)
        self._side.join()
        self.steps["critics"].step()

        products = self._critics.forward(self._chosen)
        q = self._critic_heads.forward(products, keep=True)
        self._run(_actor_loss, q, self._tasks, weights, self._log_probs, alpha.flat, self._slopes, self._figures)
        gradient = self._critic_heads.back(self._slopes, products)
        self._critics_back.by_inputs(gradient, self._action_columns, self._by_actions)
        self._run(_actor_gradient, self._by_actions, outputs, bias, noise, self._tasks, weights, self._padded,
                  alpha.flat, self._by_outputs)  # fmt: skip
        seen = self._seen[:, len(self._errors) :]
        self._actor_back.by_parameters(seen, self._by_outputs, state.actor_grads.weights, state.actor_grads.biases)
        self._side.join()
        self.steps["actor"].step()
        self._run(_finish, self._figures, state.sums, alpha.grad, alpha.flat, alpha.mean, alpha.square, alpha.steps,
                  alpha.learning_rate, programs=0)  # fmt: skip
        return self._errors

    def _run(self, kernel: Any, *tensors: Tensor, programs: int = 1) -> None:
        """Launch `programs` per block of the batch; 0: one in total."""
        constants = {name: self._constants[name] for name in kernel.arg_names if name in self._constants}
        count = programs * triton.cdiv(self._constants["B"], _ROWS) if programs else 1
        kernel[(count,)](*tensors, **constants)
