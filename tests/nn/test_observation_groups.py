"""Actor and critic with different keys of a Dict observation (asymmetric actor-critic)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn

from unidle.config import PPORecipe
from unidle.errors import UsageError
from unidle.nn.actor_critic import ActorCritic
from unidle.nn.describe import describe_small_mlp
from unidle.nn.encoder import leaf_tensor
from unidle.nn.numpy_views import numpy_unsupported
from unidle.spaces.actions import ActionLayout
from unidle.spaces.observations import ObservationLayout

SPACE = spaces.Dict(
    {
        "policy": spaces.Box(-np.inf, np.inf, (3,), np.float32),
        "privileged": spaces.Box(-np.inf, np.inf, (5,), np.float32),
        "terrain": spaces.Discrete(4),
    }
)
LAYOUT = ObservationLayout.of(SPACE)
ASYMMETRIC = PPORecipe(net_arch=(8, 8), actor_obs=("policy",), critic_obs=("policy", "privileged"))


def new_policy(recipe: PPORecipe = ASYMMETRIC, layout: ObservationLayout = LAYOUT) -> ActorCritic:
    torch.manual_seed(0)
    return ActorCritic(layout, ActionLayout.of(spaces.Box(-1, 1, (2,))), recipe)


def random_obs(*lead: int, seed: int = 0) -> Tensor:
    obs = torch.zeros(*lead, LAYOUT.obs_bytes, dtype=torch.uint8)
    generator = torch.Generator().manual_seed(seed)
    for leaf in LAYOUT.leaves[:2]:
        leaf_tensor(obs, leaf).copy_(torch.randn(*lead, *leaf.shape, generator=generator))
    return obs


def with_changed(key: str, obs: Tensor) -> Tensor:
    """The same observations with other values under `key`."""
    changed = obs.clone()
    leaf = next(leaf for leaf in LAYOUT.leaves if leaf.path == (key,))
    leaf_tensor(changed, leaf).copy_(leaf_tensor(random_obs(*obs.shape[:-1], seed=9), leaf))
    return changed


@pytest.mark.parametrize("recurrent", ["none", "gru", "lstm"])
def test_only_critic_depends_on_privileged_keys(recurrent: str) -> None:
    policy = new_policy(replace(ASYMMETRIC, recurrent=recurrent, recurrent_size=4))  # type: ignore[arg-type]
    obs, state = random_obs(6), torch.randn(6, policy.state_size)
    other = with_changed("privileged", obs)
    assert torch.equal(policy.act(obs, state)[0].mean, policy.act(other, state)[0].mean)
    assert not torch.equal(policy.value(obs, state), policy.value(other, state))
    both = [policy(seen.unsqueeze(1), torch.zeros(6, 1), state) for seen in (obs, other)]
    assert torch.equal(both[0][0].mean, both[1][0].mean)
    assert not torch.equal(both[0][1], both[1][1])


def test_unnamed_key_is_ignored() -> None:
    policy, obs = new_policy(), random_obs(6)
    other = obs.clone()
    leaf_tensor(other, LAYOUT.leaves[2]).fill_(2)
    assert torch.equal(policy.act(obs)[0].mean, policy.act(other)[0].mean)
    assert torch.equal(policy.value(obs), policy.value(other))


@pytest.mark.parametrize("recurrent", ["none", "gru"])
def test_each_loss_reaches_only_its_own_network(recurrent: str) -> None:
    policy = new_policy(replace(ASYMMETRIC, recurrent=recurrent, recurrent_size=4))  # type: ignore[arg-type]
    obs, starts, state = random_obs(6, 2), torch.zeros(6, 2), torch.randn(6, policy.state_size)
    for which in (0, 1):
        policy.zero_grad()
        params, values = policy(obs, starts, state)
        (params.mean.square().sum() if which == 0 else values.square().sum()).backward()
        reached = {name.split(".")[0] for name, p in policy.named_parameters() if p.grad is not None and p.grad.any()}
        cores = {"core"}, {"critic_core"}
        expected = ({"actor_trunk", "actor_head"}, {"critic_trunk", "critic_head"})[which]
        assert reached == expected | (cores[which] if recurrent != "none" else set())


@pytest.mark.parametrize("recurrent", ["gru", "lstm"])
def test_sequences_match_single_steps_with_both_states(recurrent: str) -> None:
    policy = new_policy(replace(ASYMMETRIC, recurrent=recurrent, recurrent_size=4))  # type: ignore[arg-type]
    n, length = 5, 7
    obs, state = random_obs(n, length), torch.randn(n, policy.state_size)
    params, values = policy(obs, torch.zeros(n, length), state)
    for t in range(length):
        torch.testing.assert_close(policy.value(obs[:, t], state), values[:, t])
        one, after = policy.act(obs[:, t], state)
        assert after is not None
        torch.testing.assert_close(one.mean, params.mean[:, t])
        state = after


def test_each_encoder_normalises_with_its_own_stats() -> None:
    policy = new_policy(replace(ASYMMETRIC, normalize_obs=True))
    obs = random_obs(4, 10)
    policy.update_norm(obs)
    assert policy.critic_encoder is not None
    given = [leaf_tensor(obs, leaf).reshape(40, -1).double() for leaf in LAYOUT.leaves[:2]]
    torch.testing.assert_close(policy.encoder.norm.mean, given[0].mean(0))  # type: ignore[union-attr]
    torch.testing.assert_close(policy.critic_encoder.norm.mean, torch.cat(given, 1).mean(0))  # type: ignore[union-attr]


def test_equal_groups_share_one_encoder() -> None:
    keys = ("privileged", "policy")
    policy = new_policy(replace(ASYMMETRIC, actor_obs=keys, critic_obs=keys[::-1]))
    assert policy.critic_encoder is None
    assert policy.encoder.n_features == 8


def test_naming_all_keys_matches_default_bit_for_bit() -> None:
    named = new_policy(replace(ASYMMETRIC, actor_obs=tuple(SPACE.spaces), critic_obs=tuple(SPACE.spaces)))
    default = new_policy(PPORecipe(net_arch=(8, 8)))
    assert named.state_dict().keys() == default.state_dict().keys()
    assert all(torch.equal(one, other) for one, other in zip(named.parameters(), default.parameters()))
    assert torch.equal(named.value(random_obs(5)), default.value(random_obs(5)))


def test_non_finite_values_in_unused_keys_are_found() -> None:
    policy = new_policy(replace(ASYMMETRIC, critic_obs=("policy",)))
    obs = random_obs(3)
    leaf_tensor(obs, LAYOUT.leaves[1])[1, 2] = torch.nan
    assert policy.encoder.all_finite(obs).tolist() == [True, False, True]


def test_kernels_and_numpy_reject_observation_groups() -> None:
    """Even if the actor's group alone is a plain vector."""
    policy = new_policy()
    assert describe_small_mlp(policy) == "the observation is not one float32 vector"
    assert numpy_unsupported(policy, 1, with_critic=False) is not None


def test_custom_network_is_built_once_per_group() -> None:
    networks_built = []

    def network(observation_space: spaces.Space, action_space: spaces.Space) -> nn.Module:
        networks_built.append(list(observation_space))  # type: ignore[call-overload]

        class Joined(nn.Module):
            def forward(self, seen: dict[str, Tensor]) -> Tensor:
                return torch.cat(list(seen.values()), -1)

        return Joined()

    policy = ActorCritic(LAYOUT, ActionLayout.of(spaces.Discrete(2)), ASYMMETRIC, network)
    assert networks_built == [["policy"], ["policy", "privileged"]]
    assert policy.value(random_obs(4)).shape == (4,)


def test_action_mask_key_belongs_to_no_group() -> None:
    space = spaces.Dict({**SPACE.spaces, "action_mask": spaces.MultiBinary(3)})
    layout = ObservationLayout.of(space, 3)
    policy = ActorCritic(layout, ActionLayout.of(spaces.Discrete(3)), ASYMMETRIC)
    obs = torch.zeros(1, layout.obs_bytes, dtype=torch.uint8)
    obs[0, layout.mask_offset + 1] = 1
    assert policy.distribution.mode(policy.act(obs)[0]).item() == 1
    with pytest.raises(UsageError, match="keys policy, privileged, terrain"):
        layout.part(("action_mask",), "actor_obs")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"actor_obs": ("polcy",)},
            r"`actor_obs` names 'polcy'; the observation has the keys policy.*\.",
        ),
        (
            {"critic_obs": ("policy", "x", "y")},
            r"`critic_obs` names 'x', 'y'; the observation has the keys .*\.",
        ),
        ({"actor_obs": ()}, r"`actor_obs` names no key; the observation has the keys .*\."),
        ({"share_trunk": True}, r"`share_trunk` needs equal `actor_obs` and `critic_obs`; remove it\."),
    ],
)
def test_invalid_groups_are_rejected(settings: dict, message: str) -> None:
    with pytest.raises(UsageError, match=f"^{message}$"):
        new_policy(replace(ASYMMETRIC, **settings))


def test_groups_need_a_dict_observation() -> None:
    with pytest.raises(UsageError, match=r"^`actor_obs` needs a Dict observation, and this one is Box.*\.$"):
        new_policy(layout=ObservationLayout.of(spaces.Box(-1, 1, (3,))))
