"""The JAX baseline of gpu_resident.py: PPO in the style of PureJaxRL, environment and learning in one `jit`.

    python benchmarks/jax_ppo.py --n-envs 4096 [--runs 1] [--updates 100] [--seconds 3] [--prng rbg]

The same work as unidle's: gymnax's CartPole, separate actor and critic of 64,64 tanh, 32 steps, 4 epochs of 4
minibatches, Adam with gradients clipped to 0.5. `--prng rbg` selects JAX's generator that is faster on accelerators.
`--runs` trains several seeds at once, each with its own environments, networks and minibatches, with `vmap`. Prints one
line of JSON: steps per second of further calls, of all runs together, after the one that compiles, and the mean episode
length at the end.
"""

from __future__ import annotations

import argparse
import json
import time
from functools import partial
from importlib.metadata import version
from typing import Any, NamedTuple

import gymnax
import jax
import jax.numpy as jnp

STEPS, EPOCHS, MINIBATCHES = 32, 4, 4
GAMMA, LAMBDA, CLIP, ENT_COEF, VF_COEF, MAX_GRAD_NORM, LEARNING_RATE = 0.99, 0.95, 0.2, 0.01, 0.5, 0.5, 2.5e-4
ENV, ENV_PARAMS = gymnax.make("CartPole-v1")


class Transition(NamedTuple):
    """One step of all environments, or a rollout."""

    observation: Any
    action: Any
    log_prob: Any
    value: Any
    reward: Any
    done: Any


def network(key: Any, outputs: int, gain: float) -> list[tuple[Any, Any]]:
    """Weights and biases of 4 → 64 → 64 → outputs."""
    sizes, gains = [(4, 64), (64, 64), (64, outputs)], (2**0.5, 2**0.5, gain)
    make = jax.nn.initializers.orthogonal
    keys = jax.random.split(key, 3)
    return [(make(g)(k, size), jnp.zeros(size[1])) for k, size, g in zip(keys, sizes, gains)]


def forward(layers: list[tuple[Any, Any]], x: Any) -> Any:
    """Apply the layers, with tanh between them."""
    for weights, bias in layers[:-1]:
        x = jnp.tanh(x @ weights + bias)
    weights, bias = layers[-1]
    return x @ weights + bias


def act_and_value(params: Any, observation: Any) -> tuple[Any, Any]:
    """Log-probabilities of both actions, and the value."""
    return jax.nn.log_softmax(forward(params["actor"], observation)), forward(params["critic"], observation)[..., 0]


def loss(params: Any, batch: Transition, advantages: Any, returns: Any) -> Any:
    """PPO's clipped loss."""
    table, value = act_and_value(params, batch.observation)
    log_prob = jnp.take_along_axis(table, batch.action[:, None], 1)[:, 0]
    ratio = jnp.exp(log_prob - batch.log_prob)
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    surrogate = jnp.minimum(ratio * advantages, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantages)
    entropy = -(jnp.exp(table) * table).sum(-1).mean()
    return -surrogate.mean() + VF_COEF * jnp.square(value - returns).mean() - ENT_COEF * entropy


def adam(params: Any, gradient: Any, state: Any) -> tuple[Any, Any]:
    """One step of Adam along the clipped gradient."""
    norm = jnp.sqrt(sum(jnp.square(g).sum() for g in jax.tree.leaves(gradient)))
    gradient = jax.tree.map(lambda g: g * jnp.minimum(1.0, MAX_GRAD_NORM / (norm + 1e-6)), gradient)
    count, mean, square = state
    count = count + 1
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, gradient)
    square = jax.tree.map(lambda s, g: 0.999 * s + 0.001 * g * g, square, gradient)
    c1, c2 = 1 - 0.9**count, 1 - 0.999**count
    params = jax.tree.map(
        lambda p, m, s: p - LEARNING_RATE * (m / c1) / (jnp.sqrt(s / c2) + 1e-5), params, mean, square
    )
    return params, (count, mean, square)


@partial(jax.jit, static_argnums=(0, 1))
def train_all(n_envs: int, updates: int, carries: Any) -> tuple[Any, Any]:
    """`train` for a batch of runs."""
    return jax.vmap(partial(train, n_envs, updates))(carries)


def train(n_envs: int, updates: int, carry: Any) -> tuple[Any, Any]:
    """Run the iterations; return the final state and the mean episode length of each."""

    def step(runner: Any, _: Any) -> tuple[Any, Any]:
        params, state, observation, key = runner
        key, for_action, for_env = jax.random.split(key, 3)
        table, value = act_and_value(params, observation)
        action = jax.random.categorical(for_action, table)
        log_prob = jnp.take_along_axis(table, action[:, None], 1)[:, 0]
        keys = jax.random.split(for_env, n_envs)
        step_all = jax.vmap(ENV.step, in_axes=(0, 0, 0, None))
        next_obs, state, reward, *flags, _ = step_all(keys, state, action, ENV_PARAMS)
        done = flags[0] | flags[-1]  # terminated and truncated, which are one flag before gymnax 1.0
        return (params, state, next_obs, key), Transition(observation, action, log_prob, value, reward, done)

    def minibatch(learner: Any, batch: Any) -> tuple[Any, None]:
        params, optimiser = learner
        return adam(params, jax.grad(loss)(params, *batch), optimiser), None

    def update(carry: Any, _: Any) -> tuple[Any, Any]:
        params, optimiser, state, observation, key = carry
        (params, state, observation, key), rollout = jax.lax.scan(step, (params, state, observation, key), None, STEPS)
        _, last = act_and_value(params, observation)

        def backwards(carry: Any, now: Transition) -> tuple[Any, Any]:
            advantage, next_value = carry
            delta = now.reward + GAMMA * next_value * (1 - now.done) - now.value
            advantage = delta + GAMMA * LAMBDA * (1 - now.done) * advantage
            return (advantage, now.value), advantage

        _, advantages = jax.lax.scan(backwards, (jnp.zeros_like(last), last), rollout, reverse=True, unroll=16)
        samples = (rollout, advantages, advantages + rollout.value)
        flat = jax.tree.map(lambda x: x.reshape(STEPS * n_envs, *x.shape[2:]), samples)

        def epoch(learner: Any, key: Any) -> tuple[Any, None]:
            order = jax.random.permutation(key, STEPS * n_envs)
            batches = jax.tree.map(lambda x: x[order].reshape(MINIBATCHES, -1, *x.shape[1:]), flat)
            return jax.lax.scan(minibatch, learner, batches)[0], None

        key, for_epochs = jax.random.split(key)
        (params, optimiser), _ = jax.lax.scan(epoch, (params, optimiser), jax.random.split(for_epochs, EPOCHS))
        length = rollout.reward.sum() / jnp.maximum(1, rollout.done.sum())
        return (params, optimiser, state, observation, key), length

    return jax.lax.scan(update, carry, None, updates)


def init(n_envs: int, seed: int) -> Any:
    """Initial networks, optimiser state and environments."""
    key, actor, critic, envs = jax.random.split(jax.random.PRNGKey(seed), 4)
    params = {"actor": network(actor, 2, 0.01), "critic": network(critic, 1, 1.0)}
    zeros = jax.tree.map(jnp.zeros_like, params)
    observation, state = jax.vmap(ENV.reset, in_axes=(0, None))(jax.random.split(envs, n_envs), ENV_PARAMS)
    return params, (0, zeros, zeros), state, observation, key


def main() -> None:
    """Compile, then measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n-envs", type=int, default=4096)
    parser.add_argument("--runs", type=int, default=1, help="seeds trained at once")
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=3.0, help="calls are repeated for so long")
    parser.add_argument("--prng", choices=["threefry2x32", "rbg"], default="threefry2x32", help="random numbers")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    jax.config.update("jax_default_prng_impl", arguments.prng)
    n_envs, updates = arguments.n_envs, arguments.updates
    began = time.perf_counter()
    train_for = partial(train_all if arguments.runs > 1 else jax.jit(train, static_argnums=(0, 1)), n_envs, updates)
    first = [init(n_envs, arguments.seed + run) for run in range(arguments.runs)]
    start = first[0] if arguments.runs == 1 else jax.tree.map(lambda *leaves: jnp.stack(leaves), *first)
    carry, _ = jax.block_until_ready(train_for(start))
    compiled = time.perf_counter()
    calls, seconds = 0, 0.0
    while seconds < arguments.seconds:
        carry, lengths = jax.block_until_ready(train_for(carry))
        calls, seconds = calls + 1, time.perf_counter() - compiled
    print(
        json.dumps(
            {
                "steps_per_second": arguments.runs * n_envs * STEPS * updates * calls / seconds,
                "first_call_seconds": compiled - began,
                "mean_length": float(lengths[..., -1].mean()),
                "device": str(jax.devices()[0]),
                "prng": arguments.prng,
                "jax": jax.__version__,
                "gymnax": version("gymnax"),
            }
        )
    )


if __name__ == "__main__":
    main()
