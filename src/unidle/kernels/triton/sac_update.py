"""One SAC update for continuous actions in about 65 kernels instead of 250.

The formulas are those of algos/sac.py, differentiated by hand. mlp.py has the forward and backward passes of the
networks, task_heads.py those of the critics' output layers, adam.py the optimiser steps. This file has the rest:
actions and their log-probabilities, targets and losses, and the temperature. The policy acts on next and current
observations in one pass, because its weights are the same.
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
from unidle.kernels.triton.mlp import BatchedBackward, BatchedMlp, SideStream
from unidle.kernels.triton.small_mlp import activated
from unidle.kernels.triton.task_heads import TaskHeads, task_of
from unidle.spaces.distributions import LOG_SQRT_2PI

_BLOCK_ROWS = 32  # transitions per program
_LOG_SQRT_2PI, _LOG_2 = tl.constexpr(LOG_SQRT_2PI), tl.constexpr(math.log(2))
_N_METRICS = tl.constexpr(4)  # logged sums: critic loss, mean Q, actor loss, entropy


@triton.jit
def _write_inputs(
    obs, next_obs, actions, inputs, tasks,
    B: tl.constexpr, OBS_WORDS: tl.constexpr, INS: tl.constexpr, INS_P2: tl.constexpr, REALS: tl.constexpr,
    REALS_P2: tl.constexpr, WIDTH: tl.constexpr, TASKS: tl.constexpr, TASKS_P2: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Write the networks' inputs [3 B, WIDTH]: next observations, observations, observations with their actions."""
    sample = tl.program_id(0) * BM + tl.arange(0, BM)
    inside = (sample < B)[:, None]
    column = tl.arange(0, INS_P2)[None, :]
    valid = inside & (column < INS)
    next_features = tl.load(next_obs + sample[:, None] * OBS_WORDS + column, mask=valid)
    features = tl.load(obs + sample[:, None] * OBS_WORDS + column, mask=valid)
    tl.store(inputs + sample[:, None] * WIDTH + column, next_features, mask=valid)
    tl.store(inputs + (B + sample)[:, None] * WIDTH + column, features, mask=valid)
    tl.store(inputs + (2 * B + sample)[:, None] * WIDTH + column, features, mask=valid)
    real = tl.arange(0, REALS_P2)[None, :]
    action = tl.load(actions + sample[:, None] * REALS + real, mask=inside & (real < REALS))
    tl.store(inputs + (2 * B + sample)[:, None] * WIDTH + INS + real, action, mask=inside & (real < REALS))
    if TASKS > 1:
        task = tl.arange(0, TASKS_P2)[None, :]
        one_hot = tl.load(
            obs + sample[:, None] * OBS_WORDS + INS - TASKS + task, mask=inside & (task < TASKS), other=-float("inf")
        )
        tl.store(tasks + sample, tl.argmax(one_hot, 1), mask=sample < B)


@triton.jit
def _alpha(log_alpha, task):
    return tl.exp(tl.load(log_alpha + task))


@triton.jit
def _sample_actions(
    outputs, bias, noise, tasks, inputs, log_probs,
    B: tl.constexpr, REALS: tl.constexpr, REALS_P2: tl.constexpr, INS: tl.constexpr, WIDTH: tl.constexpr,
    TASKS: tl.constexpr, LOG_STD_MIN: tl.constexpr, LOG_STD_MAX: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Sample actions for the first 2 B rows of `inputs` from the policy's outputs [2 B, TASKS × 2 REALS]."""
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    inside = row < 2 * B
    task = task_of(tasks, row % B, inside, TASKS)
    real = tl.arange(0, REALS_P2)[None, :]
    valid = inside[:, None] & (real < REALS)
    column = task[:, None] * 2 * REALS + real
    offs = row[:, None] * (TASKS * 2 * REALS) + column
    mean = tl.load(outputs + offs, mask=valid, other=0.0) + tl.load(bias + column, mask=valid, other=0.0)
    log_std = tl.load(outputs + offs + REALS, mask=valid, other=0.0)
    log_std += tl.load(bias + column + REALS, mask=valid, other=0.0)
    log_std = tl.minimum(tl.maximum(log_std, LOG_STD_MIN, tl.PropagateNan.ALL), LOG_STD_MAX, tl.PropagateNan.ALL)
    eps = tl.load(noise + row[:, None] * REALS + real, mask=valid, other=0.0)
    u = mean + tl.exp(log_std) * eps
    tl.store(inputs + row[:, None] * WIDTH + INS + real, activated(u, "tanh"), mask=valid)
    softplus = tl.maximum(-2.0 * u, 0.0, tl.PropagateNan.ALL) + tl.log(1.0 + tl.exp(-tl.abs(2.0 * u)))
    log_slope = 2.0 * (_LOG_2 - u - softplus)  # log(1 − tanh² u)
    terms = -0.5 * eps * eps - log_std - _LOG_SQRT_2PI - log_slope
    tl.store(log_probs + row, tl.sum(tl.where(valid, terms, 0.0), 1), mask=inside)


@triton.jit
def _value(values, member, sample, inside, B: tl.constexpr):
    """Load the values of one critic."""
    return tl.load(values + member * B + sample, mask=inside, other=0.0)


@triton.jit
def _minimum(values, sample, inside, E: tl.constexpr, B: tl.constexpr):
    """Take the minimum over the critics."""
    minimum = _value(values, 0, sample, inside, B)
    for member in tl.static_range(1, E):
        minimum = tl.minimum(minimum, _value(values, member, sample, inside, B), tl.PropagateNan.ALL)
    return minimum


@triton.jit
def _clipped(values, VALUE_LIMIT: tl.constexpr):
    """Clip values to ±VALUE_LIMIT."""
    return tl.minimum(tl.maximum(values, -VALUE_LIMIT, tl.PropagateNan.ALL), VALUE_LIMIT, tl.PropagateNan.ALL)


@triton.jit
def _critic_loss(
    next_values, values, tasks, returns, discounts, weights, log_probs, log_alpha, d_values, errors, partials,
    VALUE_LIMIT: tl.constexpr, E: tl.constexpr, B: tl.constexpr, TASKS: tl.constexpr, TASKS_P2: tl.constexpr,
    BM: tl.constexpr,
):  # fmt: skip
    """Compute the critic loss and its gradient with respect to the critics' values [E, B]."""
    sample = tl.program_id(0) * BM + tl.arange(0, BM)
    inside = sample < B
    task = task_of(tasks, sample, inside, TASKS)
    next_value = _minimum(next_values, sample, inside, E, B)
    next_value -= _alpha(log_alpha, task) * tl.load(log_probs + sample, mask=inside, other=0.0)
    target = tl.load(returns + sample, mask=inside, other=0.0)
    target += tl.load(discounts + sample, mask=inside, other=0.0) * next_value
    target = _clipped(target, VALUE_LIMIT)
    weight = tl.load(weights + sample, mask=inside, other=0.0)
    abs_error, loss, total = tl.zeros_like(target), tl.zeros_like(target), tl.zeros_like(target)
    for member in tl.static_range(E):
        q = _value(values, member, sample, inside, B)
        value = _clipped(q, VALUE_LIMIT)
        error = value - target
        gradient = tl.where(tl.abs(q) > VALUE_LIMIT, 0.0, weight * error / B)
        tl.store(d_values + member * B + sample, gradient, mask=inside)
        abs_error += tl.abs(error)
        loss += 0.5 * weight * error * error
        total += value
    tl.store(errors + sample, abs_error / E, mask=inside)
    out = partials + tl.program_id(0) * (_N_METRICS + TASKS_P2)
    tl.store(out, tl.sum(tl.where(inside, loss, 0.0)) / B)
    tl.store(out + 1, tl.sum(tl.where(inside, total, 0.0)) / (E * B))


@triton.jit
def _actor_loss(
    values, tasks, weights, log_probs, log_alpha, d_values, partials,
    TARGET_ENTROPY: tl.constexpr, E: tl.constexpr, B: tl.constexpr, TASKS: tl.constexpr, TASKS_P2: tl.constexpr,
    BM: tl.constexpr,
):  # fmt: skip
    """Compute the actor loss, its gradient with respect to the critics' values, and the gradient of log α."""
    sample = tl.program_id(0) * BM + tl.arange(0, BM)
    inside = sample < B
    task = task_of(tasks, sample, inside, TASKS)
    is_valid = (tl.load(weights + sample, mask=inside, other=0.0) > 0).to(tl.float32)
    minimum = _minimum(values, sample, inside, E, B)
    n_minimal = tl.zeros_like(minimum)  # critics that have the minimum: as in torch, they share the gradient
    for member in tl.static_range(E):
        n_minimal += (_value(values, member, sample, inside, B) == minimum).to(tl.float32)
    for member in tl.static_range(E):
        is_minimum = _value(values, member, sample, inside, B) == minimum
        tl.store(d_values + member * B + sample, tl.where(is_minimum, -is_valid / (n_minimal * B), 0.0), mask=inside)
    log_prob = tl.load(log_probs + B + sample, mask=inside, other=0.0)
    loss = is_valid * (_alpha(log_alpha, task) * log_prob - minimum)
    out = partials + tl.program_id(0) * (_N_METRICS + TASKS_P2)
    tl.store(out + 2, tl.sum(tl.where(inside, loss, 0.0)) / B)
    tl.store(out + 3, -tl.sum(log_prob) / B)
    head = tl.arange(0, TASKS_P2)
    gradient = tl.where(inside, -is_valid * (log_prob + TARGET_ENTROPY) / B, 0.0)
    tl.store(out + _N_METRICS + head, tl.sum(tl.where(head[None, :] == task[:, None], gradient[:, None], 0.0), 0))


@triton.jit
def _actor_gradient(
    d_actions, outputs, bias, noise, tasks, weights, inputs, log_alpha, d_outputs,
    E: tl.constexpr, B: tl.constexpr, REALS: tl.constexpr, INS: tl.constexpr, WIDTH: tl.constexpr,
    TASKS: tl.constexpr, OUTS_P2: tl.constexpr, LOG_STD_MIN: tl.constexpr, LOG_STD_MAX: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Backpropagate from the actions [E, B, REALS] to the policy's outputs [B, TASKS × 2 REALS]."""
    sample = tl.program_id(0) * BM + tl.arange(0, BM)
    inside = sample < B
    task = task_of(tasks, sample, inside, TASKS)
    column = tl.arange(0, OUTS_P2)[None, :]
    in_head = inside[:, None] & (column // (2 * REALS) == task[:, None])  # outputs of the sample's own task
    is_std = column % (2 * REALS) >= REALS
    real = column % REALS
    d_action = tl.zeros((BM, OUTS_P2), tl.float32)
    for member in tl.static_range(E):
        d_action += tl.load(d_actions + (member * B + sample)[:, None] * REALS + real, mask=in_head, other=0.0)
    row = B + sample
    action = tl.load(inputs + row[:, None] * WIDTH + INS + real, mask=in_head, other=0.0)
    eps = tl.load(noise + row[:, None] * REALS + real, mask=in_head, other=0.0)
    std_column = task[:, None] * 2 * REALS + REALS + real
    log_std = tl.load(outputs + row[:, None] * (TASKS * 2 * REALS) + std_column, mask=in_head, other=0.0)
    log_std += tl.load(bias + std_column, mask=in_head, other=0.0)
    is_valid = (tl.load(weights + sample, mask=inside, other=0.0) > 0).to(tl.float32)
    d_log_prob = (is_valid * _alpha(log_alpha, task) / B)[:, None]
    d_u = d_action * (1.0 - action * action) + d_log_prob * 2.0 * action
    d_log_std = d_u * eps * tl.exp(log_std) - d_log_prob
    d_log_std = tl.where((log_std < LOG_STD_MIN) | (log_std > LOG_STD_MAX), 0.0, d_log_std)
    gradient = tl.where(in_head, tl.where(is_std, d_log_std, d_u), 0.0)
    tl.store(
        d_outputs + sample[:, None] * (TASKS * 2 * REALS) + column,
        gradient,
        mask=inside[:, None] & (column < TASKS * 2 * REALS),
    )


@triton.jit
def _reduce_and_update_alpha(
    partials, sums, grad, log_alpha, means, mean_squares, steps, learning_rate,
    BLOCKS: tl.constexpr, TASKS: tl.constexpr, TASKS_P2: tl.constexpr, LEARN_ALPHA: tl.constexpr,
    LOG_BETA1: tl.constexpr, LOG_BETA2: tl.constexpr, BETA1: tl.constexpr, BETA2: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Sum the metrics of all programs, in order, and step the temperature."""
    metric, head = tl.arange(0, _N_METRICS), tl.arange(0, TASKS_P2)
    total, gradient = tl.zeros((_N_METRICS,), tl.float32), tl.zeros((TASKS_P2,), tl.float32)
    for block in range(BLOCKS):
        part = partials + block * (_N_METRICS + TASKS_P2)
        total += tl.load(part + metric)
        gradient += tl.load(part + _N_METRICS + head)
    tl.store(sums + metric, tl.load(sums + metric) + total)
    if LEARN_ALPHA:
        inside = head < TASKS
        tl.store(grad + head, gradient, mask=inside)
        temperature, mean, square = adam(
            tl.load(log_alpha + head, mask=inside, other=0.0),
            gradient,
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
    n_inputs: int  # the first words of an observation, which are the networks' inputs
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
        device, ins, members = state.sums.device, state.n_inputs, len(state.critics.weights[0])

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        width = -(-(ins + reals) // 4) * 4  # rows start at multiples of 16 bytes
        self._inputs = zeros(3 * batch, width)
        self._tasks = zeros(batch, dtype=torch.int32)
        self._log_probs, self._errors = zeros(2 * batch), zeros(batch)
        blocks, tasks_p2 = triton.cdiv(batch, _BLOCK_ROWS), triton.next_power_of_2(state.n_tasks)
        self._partials = zeros(blocks, _N_METRICS.value + tasks_p2)
        outs = 2 * reals * state.n_tasks
        self._d_outputs = zeros(1, batch, outs)  # gradient of the actor's outputs
        self._d_values, self._d_actions = zeros(members, batch), zeros(members, batch, reals)
        self._constants: dict[str, Any] = {
            "B": batch,
            "E": members,
            "BM": _BLOCK_ROWS,
            "OBS_WORDS": state.obs_words,
            "INS": ins,
            "INS_P2": triton.next_power_of_2(ins),
            "REALS": reals,
            "REALS_P2": triton.next_power_of_2(reals),
            "WIDTH": width,
            "TASKS": state.n_tasks,
            "TASKS_P2": tasks_p2,
            "OUTS_P2": triton.next_power_of_2(outs),
            "LOG_STD_MIN": state.log_std_range[0],
            "LOG_STD_MAX": state.log_std_range[1],
            "TARGET_ENTROPY": state.target_entropy,
            "VALUE_LIMIT": state.value_limit,
            "BLOCKS": blocks,
            "LEARN_ALPHA": state.learns_alpha,
            "EPS": state.alpha_adam.eps,
            **beta_constants(state.alpha_adam),
        }
        inputs = self._inputs[:, : ins + reals]
        # Inputs of the critics: (s', a'), (s, ã) and (s, a).
        self._next_inputs, self._policy_inputs, self._batch_inputs = (
            inputs.view(3, batch, -1).expand(members, -1, -1, -1).unbind(1)
        )
        self._actor_inputs = inputs[None, : 2 * batch, :ins]  # next observations, then current ones
        self._action_columns = slice(ins, ins + reals)

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
        self._actor_backward = BatchedBackward(self._actor, self._side, first_row=batch)
        self._critics_backward = BatchedBackward(self._critics, self._side)
        weights, biases = state.critic_grads.weights, state.critic_grads.biases
        self._critic_grads = weights[:-1], [*biases[:-2], None]
        self._head_grads = biases[-2], weights[-1], biases[-1]
        learned = [state.actor_adam, state.critics_adam, *([state.alpha_adam] if state.learns_alpha else [])]
        self._step_counts = [adam_state.steps for adam_state in learned]
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
        torch._foreach_add_(self._step_counts, 1.0)
        self._run(
            _write_inputs, obs.view(torch.float32), next_obs.view(torch.float32), actions, self._inputs, self._tasks
        )
        with self._side():
            products = self._critics.forward(self._batch_inputs)
            q = self._critic_heads.forward(products, keep=True)
        outputs, bias = self._actor.forward(self._actor_inputs), self._actor.biases[-1]
        self._run(_sample_actions, outputs, bias, noise, self._tasks, self._inputs, self._log_probs, programs=2)
        next_q = self._target_heads.forward(self._targets.forward(self._next_inputs), keep=False)
        self._side.join()
        self._run(_critic_loss, next_q, q, self._tasks, returns, discounts, weights, self._log_probs,
                  alpha.flat, self._d_values, self._errors, self._partials)  # fmt: skip
        gradient = self._critic_heads.backward(self._d_values, products, self._head_grads)
        self._critics_backward.parameter_gradients(self._batch_inputs, gradient, *self._critic_grads)
        self._side.join()
        self.steps["critics"].step()

        products = self._critics.forward(self._policy_inputs)
        q = self._critic_heads.forward(products, keep=True)
        self._run(_actor_loss, q, self._tasks, weights, self._log_probs, alpha.flat, self._d_values, self._partials)
        gradient = self._critic_heads.backward(self._d_values, products)
        self._critics_backward.input_gradients(gradient, self._action_columns, self._d_actions)
        self._run(_actor_gradient, self._d_actions, outputs, bias, noise, self._tasks, weights, self._inputs,
                  alpha.flat, self._d_outputs)  # fmt: skip
        actor_inputs, grads = self._actor_inputs[:, len(self._errors) :], state.actor_grads
        self._actor_backward.parameter_gradients(actor_inputs, self._d_outputs, grads.weights, grads.biases)
        self._side.join()
        self.steps["actor"].step()
        self._run(_reduce_and_update_alpha, self._partials, state.sums, alpha.grad, alpha.flat, alpha.mean,
                  alpha.square, alpha.steps, alpha.learning_rate, programs=0)  # fmt: skip
        return self._errors

    def _run(self, kernel: Any, *tensors: Tensor, programs: int = 1) -> None:
        """Launch `kernel` with `programs` programs per block of the batch; 0: one program in total."""
        constants = {name: self._constants[name] for name in kernel.arg_names if name in self._constants}
        count = programs * triton.cdiv(self._constants["B"], _BLOCK_ROWS) if programs else 1
        kernel[(count,)](*tensors, **constants)
