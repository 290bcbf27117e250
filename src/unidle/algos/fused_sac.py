"""An update of SAC for reals in some 65 kernels instead of 250 (Triton beside torch's matrix products).

The formulas are those of sac.py, differentiated by hand. Networks go forwards and back in fused_network.py, critics end
in fused_heads.py, parameters are stepped in kernels/triton/adam.py. Here is what lies between: actions and their
log-probabilities, targets and losses, and the temperature. The policy acts on what came next and on what was seen in
one pass, as its weights are the same.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from unidle.algos.fused_heads import FusedHeads, task_of
from unidle.algos.fused_network import BatchedGradient, BatchedNetwork, SideStream
from unidle.kernels.triton.adam import FusedAdam, adam, beta_constants
from unidle.kernels.triton.small_mlp import ACTIVATIONS
from unidle.nn.sac_policy import LOG_STD_RANGE

if TYPE_CHECKING:
    from unidle.algos.sac import SAC
    from unidle.buffers.replay import Transitions

_ROWS = 32  # of a batch that a program takes
_LOG_SQRT_2PI = tl.constexpr(0.9189385332046727)
_LOG_2 = tl.constexpr(0.6931471805599453)
_FIGURES = tl.constexpr(4)  # that are logged: loss and mean of the values, loss of the policy, entropy


@triton.jit
def _spread(
    obs, next_obs, actions, inputs, tasks,
    B: tl.constexpr, ROW: tl.constexpr, SEEN: tl.constexpr, SEEN_UP: tl.constexpr, REALS: tl.constexpr,
    REALS_UP: tl.constexpr, WIDTH: tl.constexpr, TASKS: tl.constexpr, TASKS_UP: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Lay out what networks get, [3 B, WIDTH]: what came next, and what was seen without and with its action."""
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
        told = tl.load(
            obs + sample[:, None] * ROW + SEEN - TASKS + place, mask=inside & (place < TASKS), other=-float("inf")
        )
        tl.store(tasks + sample, tl.argmax(told, 1), mask=sample < B)


@triton.jit
def _temperature(log_temperature, task):
    return tl.exp(tl.load(log_temperature + task))


@triton.jit
def _tanh(u):
    return 1.0 - 2.0 / (tl.exp(2.0 * u) + 1.0)


@triton.jit
def _choose(
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
    tl.store(inputs + row[:, None] * WIDTH + SEEN + real, _tanh(u), mask=valid)
    soft_plus = tl.maximum(-2.0 * u, 0.0, tl.PropagateNan.ALL) + tl.log(1.0 + tl.exp(-tl.abs(2.0 * u)))
    log_slope = 2.0 * (_LOG_2 - u - soft_plus)  # log(1 − tanh² u)
    each = -0.5 * drawn * drawn - log_std - _LOG_SQRT_2PI - log_slope
    tl.store(log_probs + row, tl.sum(tl.where(valid, each, 0.0), 1), mask=inside)


@triton.jit
def _value(values, member, sample, inside, B: tl.constexpr):
    """What a critic says."""
    return tl.load(values + member * B + sample, mask=inside, other=0.0)


@triton.jit
def _least(values, sample, inside, E: tl.constexpr, B: tl.constexpr):
    """Give the least of the critics' values."""
    least = _value(values, 0, sample, inside, B)
    for member in tl.static_range(1, E):
        least = tl.minimum(least, _value(values, member, sample, inside, B), tl.PropagateNan.ALL)
    return least


@triton.jit
def _limited(values, LIMIT: tl.constexpr):
    """Keep values within ±LIMIT."""
    return tl.minimum(tl.maximum(values, -LIMIT, tl.PropagateNan.ALL), LIMIT, tl.PropagateNan.ALL)


@triton.jit
def _judge_values(
    next_values, values, tasks, returns, discounts, weights, log_probs, log_temperature, slopes, errors, figures,
    LIMIT: tl.constexpr, E: tl.constexpr, B: tl.constexpr, TASKS: tl.constexpr, TASKS_UP: tl.constexpr,
    BM: tl.constexpr,
):  # fmt: skip
    """Take the critics' loss, and its slope by their values [E, B]."""
    sample = tl.program_id(0) * BM + tl.arange(0, BM)
    inside = sample < B
    task = task_of(tasks, sample, inside, TASKS)
    soft = _least(next_values, sample, inside, E, B)
    soft -= _temperature(log_temperature, task) * tl.load(log_probs + sample, mask=inside, other=0.0)
    following = tl.load(returns + sample, mask=inside, other=0.0)
    following += tl.load(discounts + sample, mask=inside, other=0.0) * soft
    following = _limited(following, LIMIT)
    weight = tl.load(weights + sample, mask=inside, other=0.0)
    off, loss, total = tl.zeros_like(following), tl.zeros_like(following), tl.zeros_like(following)
    for member in tl.static_range(E):
        said = _value(values, member, sample, inside, B)
        value = _limited(said, LIMIT)
        error = value - following
        tl.store(slopes + member * B + sample, tl.where(tl.abs(said) > LIMIT, 0.0, weight * error / B), mask=inside)
        off += tl.abs(error)
        loss += 0.5 * weight * error * error
        total += value
    tl.store(errors + sample, off / E, mask=inside)
    own = figures + tl.program_id(0) * (_FIGURES + TASKS_UP)
    tl.store(own, tl.sum(tl.where(inside, loss, 0.0)) / B)
    tl.store(own + 1, tl.sum(tl.where(inside, total, 0.0)) / (E * B))


@triton.jit
def _judge_actions(
    values, tasks, weights, log_probs, log_temperature, slopes, figures,
    ENTROPY: tl.constexpr, E: tl.constexpr, B: tl.constexpr, TASKS: tl.constexpr, TASKS_UP: tl.constexpr,
    BM: tl.constexpr,
):  # fmt: skip
    """Take the policy's loss, its slope by the critics' values, and that of the temperature by its logarithm."""
    sample = tl.program_id(0) * BM + tl.arange(0, BM)
    inside = sample < B
    task = task_of(tasks, sample, inside, TASKS)
    counts = (tl.load(weights + sample, mask=inside, other=0.0) > 0).to(tl.float32)
    least = _least(values, sample, inside, E, B)
    equal = tl.zeros_like(least)
    for member in tl.static_range(E):
        equal += (_value(values, member, sample, inside, B) == least).to(tl.float32)
    for member in tl.static_range(E):
        is_least = _value(values, member, sample, inside, B) == least
        tl.store(slopes + member * B + sample, tl.where(is_least, -counts / (equal * B), 0.0), mask=inside)
    log_prob = tl.load(log_probs + B + sample, mask=inside, other=0.0)
    loss = counts * (_temperature(log_temperature, task) * log_prob - least)
    own = figures + tl.program_id(0) * (_FIGURES + TASKS_UP)
    tl.store(own + 2, tl.sum(tl.where(inside, loss, 0.0)) / B)
    tl.store(own + 3, -tl.sum(log_prob) / B)
    head = tl.arange(0, TASKS_UP)
    slope = tl.where(inside, -counts * (log_prob + ENTROPY) / B, 0.0)
    tl.store(own + _FIGURES + head, tl.sum(tl.where(head[None, :] == task[:, None], slope[:, None], 0.0), 0))


@triton.jit
def _through_choice(
    by_actions, outputs, bias, noise, tasks, weights, inputs, log_temperature, by_outputs,
    E: tl.constexpr, B: tl.constexpr, REALS: tl.constexpr, SEEN: tl.constexpr, WIDTH: tl.constexpr,
    TASKS: tl.constexpr, OUTS_UP: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """From slopes by actions [E, B, REALS] to those by the policy's outputs [B, TASKS × 2 REALS]."""
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
    by_log_prob = (counts * _temperature(log_temperature, task) / B)[:, None]
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
    figures, sums, grad, log_temperature, means, mean_squares, steps, learning_rate,
    BLOCKS: tl.constexpr, TASKS: tl.constexpr, TASKS_UP: tl.constexpr, AUTO: tl.constexpr,
    LOG_BETA1: tl.constexpr, LOG_BETA2: tl.constexpr, BETA1: tl.constexpr, BETA2: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Add up what all programs noted, in order, and step the temperature."""
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
            tl.load(log_temperature + head, mask=inside, other=0.0),
            slope,
            tl.load(means + head, mask=inside, other=0.0),
            tl.load(mean_squares + head, mask=inside, other=0.0),
            tl.load(steps),
            tl.load(learning_rate),
            LOG_BETA1, LOG_BETA2, BETA1, BETA2, EPS,
        )  # fmt: skip
        tl.store(log_temperature + head, temperature, mask=inside)
        tl.store(means + head, mean, mask=inside)
        tl.store(mean_squares + head, square, mask=inside)


def suits(algo: SAC) -> bool:
    """Whether there are kernels for it: reals from one vector of numbers as it is, through plain layers."""
    policy, encoder = algo.policy, algo.policy.encoder
    return (
        bool(policy.distribution.reals)
        and encoder.is_plain
        and encoder.norm is None
        and len(algo.critics.ensemble.weights) > 1
        and type(algo.critics.ensemble.activation) in ACTIVATIONS
    )


class FusedUpdate:
    """Learns from batches as `SAC.learn_plainly` does, on the same parameters, gradients, optimisers and sums."""

    def __init__(self, algo: SAC) -> None:
        policy, recipe, device = algo.policy, algo.recipe, algo.parameters.flat.device
        assert isinstance(recipe.batch_size, int)
        self._algo, batch, reals = algo, recipe.batch_size, policy.distribution.reals
        seen, members = policy.encoder.n_features, recipe.n_critics
        activation = ACTIVATIONS[type(algo.critics.ensemble.activation)]
        linears: list[Any] = [*(m for m in policy.actor_trunk if isinstance(m, nn.Linear)), policy.actor_head]

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        width = -(-(seen + reals) // 4) * 4  # rows that begin at a multiple of 16 bytes
        self._padded = zeros(3 * batch, width)
        self._tasks = zeros(batch, dtype=torch.int32)
        self._log_probs, self._errors = zeros(2 * batch), zeros(batch)
        blocks, tasks_up = triton.cdiv(batch, _ROWS), triton.next_power_of_2(recipe.n_tasks)
        self._figures = zeros(blocks, _FIGURES.value + tasks_up)
        outs = 2 * reals * recipe.n_tasks
        self._by_outputs = zeros(1, batch, outs)  # of the policy
        self._slopes, self._by_actions = zeros(members, batch), zeros(members, batch, reals)
        self._sizes: dict[str, Any] = {
            "B": batch,
            "E": members,
            "BM": _ROWS,
            "ROW": policy.obs_layout.obs_bytes // 4,
            "SEEN": seen,
            "SEEN_UP": triton.next_power_of_2(seen),
            "REALS": reals,
            "REALS_UP": triton.next_power_of_2(reals),
            "WIDTH": width,
            "TASKS": recipe.n_tasks,
            "TASKS_UP": tasks_up,
            "OUTS_UP": triton.next_power_of_2(outs),
            "LOW": LOG_STD_RANGE[0],
            "HIGH": LOG_STD_RANGE[1],
            "ENTROPY": algo.target_entropy,
            "LIMIT": math.inf if recipe.value_limit is None else recipe.value_limit,
            "BLOCKS": blocks,
            "AUTO": recipe.temperature == "auto",
            "EPS": recipe.adam_eps,
            **beta_constants(algo.adams["temperature"]),
        }
        whole = self._padded[:, : seen + reals]
        self._next, self._chosen, self._taken = whole.view(3, batch, -1).expand(members, -1, -1, -1).unbind(1)
        self._seen = whole[None, : 2 * batch, :seen]  # what came next, then what was seen
        self._action_columns = slice(seen, seen + reals)

        self._beside = SideStream(device)
        actor = BatchedNetwork(
            [m.weight.detach().t()[None] for m in linears],
            [m.bias.detach()[None] for m in linears],
            2 * batch,
            activation,
        )
        own, follow = (_layers(net.ensemble) for net in (algo.critics, algo.targets))
        critics, targets = (BatchedNetwork(w[:-1], b[:-1], batch, activation) for w, b in (own, follow))
        self._critics_heads, self._targets_heads = (
            FusedHeads(w[-1], b[-1], b[-2], self._tasks, activation) for w, b in (own, follow)
        )
        self._actor, self._critics, self._targets = actor, critics, targets
        self._actor_back = BatchedGradient(actor, self._beside, since=batch)
        self._critics_back = BatchedGradient(critics, self._beside)
        grads = [algo.parameters.grad_of(p) for m in linears for p in (m.weight, m.bias)]
        self._actor_grads = [g.t()[None] for g in grads[::2]], [g[None] for g in grads[1::2]]
        ensemble = algo.critics.ensemble
        weights = [algo.critic_parameters.grad_of(p) for p in ensemble.weights]
        biases = [algo.critic_parameters.grad_of(p).squeeze(1) for p in ensemble.biases]
        self._critic_grads = weights[:-1], [*biases[:-2], None]
        self._head_grads = biases[-2], weights[-1], biases[-1]
        self._counts = [each.steps for name, each in algo.adams.items() if name != "temperature" or self._sizes["AUTO"]]
        self.steps = {
            "critics": FusedAdam(algo.adams["critics"], recipe.max_grad_norm, algo.target_flat, recipe.tau),
            "actor": FusedAdam(algo.adams["actor"], recipe.max_grad_norm),
        }

    @torch.no_grad()
    def learn(self, batch: Transitions, noise: Tensor) -> Tensor:
        """Take a step of all parts; returns how wrong the values were [B]. The same memory every time."""
        algo = self._algo
        torch._foreach_add_(self._counts, 1.0)
        self._run(_spread, batch.obs.view(torch.float32), batch.next_obs.view(torch.float32), batch.actions,
                  self._padded, self._tasks)  # fmt: skip
        with self._beside():
            products = self._critics.forward(self._taken)
            said = self._critics_heads.forward(products, keep=True)
        outputs, bias = self._actor.forward(self._seen), self._actor.biases[-1]
        self._run(_choose, outputs, bias, noise, self._tasks, self._padded, self._log_probs, programs=2)
        expected = self._targets_heads.forward(self._targets.forward(self._next), keep=False)
        self._beside.join()
        self._run(_judge_values, expected, said, self._tasks, batch.returns, batch.discounts, batch.weights,
                  self._log_probs, algo.log_temperature, self._slopes, self._errors, self._figures)  # fmt: skip
        gradient = self._critics_heads.back(self._slopes, products, self._head_grads)
        self._critics_back.by_parameters(self._taken, gradient, *self._critic_grads)
        self._beside.join()
        self.steps["critics"].step()

        products = self._critics.forward(self._chosen)
        said = self._critics_heads.forward(products, keep=True)
        self._run(_judge_actions, said, self._tasks, batch.weights, self._log_probs, algo.log_temperature,
                  self._slopes, self._figures)  # fmt: skip
        gradient = self._critics_heads.back(self._slopes, products)
        self._critics_back.by_inputs(gradient, self._action_columns, self._by_actions)
        self._run(_through_choice, self._by_actions, outputs, bias, noise, self._tasks, batch.weights, self._padded,
                  algo.log_temperature, self._by_outputs)  # fmt: skip
        seen = self._seen[:, len(self._errors) :]
        self._actor_back.by_parameters(seen, self._by_outputs, *self._actor_grads)
        self._beside.join()
        self.steps["actor"].step()
        temperature = algo.adams["temperature"]
        self._run(_finish, self._figures, algo.sums, algo.temperature_grad, algo.log_temperature, temperature.mean,
                  temperature.square, temperature.steps, algo.learning_rate, programs=0)  # fmt: skip
        return self._errors

    def _run(self, kernel: Any, *tensors: Tensor, programs: int = 1) -> None:
        """`programs` for each part of the batch; 0: one in all."""
        sizes = {name: self._sizes[name] for name in kernel.arg_names if name in self._sizes}
        count = programs * triton.cdiv(self._sizes["B"], _ROWS) if programs else 1
        kernel[(count,)](*tensors, **sizes)


def _layers(ensemble: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Weights [E, n, m] and biases [E, m]."""
    return [p.detach() for p in ensemble.weights], [p.detach().squeeze(1) for p in ensemble.biases]
