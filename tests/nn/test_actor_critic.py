"""The actor-critic policy: masks, trunks, initial weights and custom networks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn

from unidle.config import PPORecipe, Recipe, recipe_for
from unidle.errors import UsageError
from unidle.nn.actor_critic import ActorCritic, n_parameters
from unidle.spaces.actions import ActionLayout
from unidle.spaces.observations import ObservationLayout

BOX = spaces.Box(-np.inf, np.inf, (3,))
JOINT = spaces.Dict({"go": spaces.MultiDiscrete([3, 2]), "how": spaces.Box(-1, 1, (2,))})
SMALL = PPORecipe(net_arch=(8, 8))


def make_policy(
    observation: spaces.Space = BOX,
    action: spaces.Space = JOINT,
    recipe: Recipe = SMALL,
    masked: bool = False,
    **kwargs,
) -> ActorCritic:
    torch.manual_seed(0)
    actions = ActionLayout.of(action)
    return ActorCritic(
        ObservationLayout.of(observation, actions.mask_width if masked else 0), actions, recipe, **kwargs
    )


def random_obs(policy: ActorCritic, *lead: int) -> Tensor:
    """Normally distributed observations; all actions are allowed."""
    layout = policy.obs_layout
    obs = np.zeros((int(np.prod(lead)), layout.obs_bytes), np.uint8)
    write = layout.writer(obs)
    rng = np.random.default_rng(0)
    for i in range(len(obs)):
        write(i, rng.normal(size=3).astype(np.float32))
    layout.mask_view(obs)[:] = 1
    return torch.from_numpy(obs).view(*lead, -1)


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("recurrent", ["none", "gru", "lstm"])
def test_act_and_value_match_forward(share: bool, recurrent: str) -> None:
    recipe = replace(SMALL, share_trunk=share, recurrent=recurrent, recurrent_size=6)
    policy = make_policy(recipe=recipe)
    n, steps = 4, 5
    obs = random_obs(policy, n, steps)
    starts = torch.rand(n, steps, generator=torch.Generator().manual_seed(3)) < 0.4
    state = torch.randn(n, policy.state_size)
    params, values = policy(obs, starts, state)
    assert values.shape == (n, steps)
    for t in range(steps):
        state = state * ~starts[:, t, None]
        value = policy.value(obs[:, t], state)
        single, after = policy.act(obs[:, t], state)
        torch.testing.assert_close(single.logits, params.logits[:, t])
        torch.testing.assert_close(single.mean, params.mean[:, t])
        torch.testing.assert_close(value, values[:, t])
        state = after if recurrent != "none" else state


@pytest.mark.parametrize("recurrent", [("none", 0), ("gru", 6), ("lstm", 12)])
def test_state_size_matches_recurrent_layer(recurrent: tuple[str, int]) -> None:
    kind, size = recurrent
    assert make_policy(recipe=replace(SMALL, recurrent=kind, recurrent_size=6)).state_size == size


def test_masked_actions_are_never_sampled() -> None:
    policy = make_policy(action=spaces.MultiDiscrete([4, 3]), masked=True)
    obs = random_obs(policy, 50)
    mask = torch.tensor([0, 1, 0, 1, 1, 0, 0], dtype=torch.uint8)
    start = policy.obs_layout.mask_offset
    obs[:25, start : start + 7] = mask
    params, _ = policy.act(obs)
    probabilities = policy.distribution.log_probs(params.logits).exp()  # [50, 2, 4]
    assert (probabilities[:25, 0, [0, 2]] == 0).all()
    assert (probabilities[:25, 1, 0] == 1).all()
    assert (probabilities[25:, 0] > 0).all()
    actions = policy.distribution.sample(params, torch.rand(50, 2))
    assert set(actions[:25, 0].tolist()) <= {1.0, 3.0}
    assert set(actions[:25, 1].tolist()) == {0.0}


def test_action_mask_does_not_affect_values() -> None:
    policy = make_policy(action=spaces.Discrete(4), masked=True)
    obs = random_obs(policy, 6)
    values = policy.value(obs)
    start = policy.obs_layout.mask_offset
    obs[:, start : start + 3] = 0
    assert torch.equal(policy.value(obs), values)


def test_value_gradient_reaches_actor_trunk_only_if_shared() -> None:
    for share in (False, True):
        policy = make_policy(recipe=replace(SMALL, share_trunk=share))
        _, values = policy(random_obs(policy, 5, 1))
        values.sum().backward()
        reached = any(p.grad is not None for p in policy.actor_trunk.parameters())
        assert reached == share
        assert (policy.critic_trunk is None) == share


def test_shared_trunk_saves_its_parameters() -> None:
    separate, shared = (n_parameters(make_policy(recipe=replace(SMALL, share_trunk=share))) for share in (False, True))
    trunk = (3 * 8 + 8) + (8 * 8 + 8)
    heads = (8 * 7 + 7) + (8 + 1) + 2
    assert (separate, shared) == (2 * trunk + heads, trunk + heads)


def test_heads_work_without_hidden_layers() -> None:
    policy = make_policy(recipe=replace(SMALL, net_arch=()))
    params, values = policy(random_obs(policy, 2, 3))
    assert params.logits.shape == (2, 3, 5)
    assert values.shape == (2, 3)
    assert policy.actor_head.in_features == 3


@pytest.mark.parametrize("recurrent", ["none", "lstm"])
@pytest.mark.parametrize("critic_arch", [(5, 9, 7), ()], ids=["three layers", "linear"])
def test_critic_may_have_other_layers_than_actor(critic_arch: tuple[int, ...], recurrent: str) -> None:
    policy = make_policy(recipe=replace(SMALL, critic_arch=critic_arch, recurrent=recurrent, recurrent_size=6))
    actor, critic = (
        [layer.out_features for layer in trunk if isinstance(layer, nn.Linear)]
        for trunk in (policy.actor_trunk, policy.critic_trunk)
    )
    assert (actor, critic) == ([8, 8], list(critic_arch))
    obs, state = random_obs(policy, 4, 1), torch.randn(4, policy.state_size)
    params, values = policy(obs, torch.zeros(4, 1, dtype=torch.bool), state)
    torch.testing.assert_close(policy.act(obs[:, 0], state)[0].mean, params.mean[:, 0])
    torch.testing.assert_close(policy.value(obs[:, 0], state), values[:, 0])


def test_critic_arch_equal_to_net_arch_changes_nothing() -> None:
    default, same = make_policy(), make_policy(recipe=replace(SMALL, critic_arch=(8, 8)))
    for name, value in default.state_dict().items():
        assert torch.equal(same.state_dict()[name], value), name


def test_initial_weights_are_orthogonal_with_small_actor_gain() -> None:
    policy = make_policy(recipe=replace(SMALL, net_arch=(16, 16)))
    for layer, gain in [
        (policy.actor_trunk[2], 2**0.5),
        (policy.critic_trunk[2], 2**0.5),
        (policy.actor_head, 0.01),
        (policy.critic_head, 1.0),
    ]:
        weight = layer.weight
        torch.testing.assert_close(weight @ weight.T, gain**2 * torch.eye(len(weight)), atol=1e-5 * gain**2, rtol=1e-4)
        assert (layer.bias == 0).all()


def test_initial_policy_is_nearly_uniform() -> None:
    policy = make_policy(action=spaces.Discrete(5))
    params, _ = policy.act(random_obs(policy, 100))
    probabilities = policy.distribution.log_probs(params.logits).exp()
    assert (probabilities - 0.2).abs().max() < 0.01


def test_log_std_starts_at_log_std_init() -> None:
    policy = make_policy(action=spaces.Box(-1, 1, (3,)), recipe=replace(SMALL, log_std_init=-0.7))
    params, _ = policy.act(random_obs(policy, 2))
    torch.testing.assert_close(params.log_std, torch.full((3,), -0.7))
    assert params.log_std.requires_grad


def test_normalize_obs_adds_running_stats_to_encoder() -> None:
    assert make_policy().encoder.norm is None
    assert make_policy(recipe=replace(SMALL, normalize_obs=True)).encoder.norm is not None


# -- custom networks ---------------------------------------------------------------------------------------------------


class CameraAndSpeed(nn.Module):
    """Features from the camera and the speed of a Dict observation."""

    def __init__(self, observation_space: spaces.Dict) -> None:
        super().__init__()
        self.camera = nn.Linear(int(np.prod(observation_space["camera"].shape)), 4)

    def forward(self, observation: dict[str, Tensor]) -> Tensor:
        return torch.cat([self.camera(observation["camera"].float().flatten(1)), observation["speed"]], -1)


CAR = spaces.Dict({"camera": spaces.Box(0, 255, (8, 8, 3), np.uint8), "speed": spaces.Box(-1, 1, (2,))})


def test_custom_network_is_built_from_both_spaces_and_trained() -> None:
    torch.manual_seed(0)  # with another seed, all of these few units might be saturated
    CAR.seed(0)
    given_spaces = []

    def network(observation_space: spaces.Space, action_space: spaces.Space) -> nn.Module:
        given_spaces.append((observation_space, action_space))
        return CameraAndSpeed(observation_space)

    policy = make_policy(observation=CAR, network=network)
    assert given_spaces == [(CAR, JOINT)]
    assert policy.actor_trunk[0].in_features == 6
    layout = policy.obs_layout
    obs = torch.from_numpy(np.stack([layout.pack(CAR.sample()) for _ in range(6)])).view(3, 2, -1)
    _, values = policy(obs)
    values.sum().backward()
    assert policy.encoder.module.camera.weight.grad.abs().sum() > 0
    assert n_parameters(policy.encoder) == n_parameters(policy.encoder.module)


def test_custom_network_replaces_built_in_encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    created = []
    register = nn.Module.register_parameter

    def count(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        created.append(0 if parameter is None else parameter.numel())
        register(module, name, parameter)

    monkeypatch.setattr(nn.Module, "register_parameter", count)
    space = spaces.Dict({**CAR.spaces, "place": spaces.Discrete(2**40)})
    policy = make_policy(observation=space, network=lambda observations, _: CameraAndSpeed(observations))
    assert sum(created) == n_parameters(policy)


def test_custom_network_without_features_is_rejected() -> None:
    class Constant(nn.Module):
        def forward(self, observation: Tensor) -> Tensor:
            return torch.zeros(6)

    with pytest.raises(UsageError, match=r"must map a batch of observations to a \[batch, features\] tensor"):
        make_policy(network=lambda *_: Constant())


def test_custom_network_with_normalize_obs_is_rejected() -> None:
    with pytest.raises(UsageError, match="normalize_obs does not apply to a custom network"):
        make_policy(recipe=replace(SMALL, normalize_obs=True), network=lambda *_: nn.Linear(3, 4))


def test_weights_can_have_torchs_default_initialisation() -> None:
    obs_layout = ObservationLayout.of(spaces.Box(-1, 1, (3,), np.float32))
    actions = ActionLayout.of(spaces.Discrete(2))
    biases = {
        ortho_init: ActorCritic(obs_layout, actions, recipe_for(ortho_init=ortho_init)).critic_head.bias.item()
        for ortho_init in (True, False)
    }
    assert biases[True] == 0 != biases[False]
