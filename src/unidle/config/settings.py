"""The settings: those that affect learning (one recipe per algorithm), those that affect only speed (engine), the run.

The docstring of a field is its `--help` text and its row in the settings page of the docs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, TypeVar

AlgorithmName = Literal["ppo", "sac", "td3", "dqn"]
Activation = Literal["tanh", "relu", "elu", "silu", "gelu"]
Schedule = Literal["constant", "linear"]
OptimizerName = Literal["adam", "adamw", "rmsprop", "sgd"]
ImageEncoderName = Literal["nature", "impala"]

_Value = TypeVar("_Value")
# A setting for which None means that unidle chooses; elsewhere None means off, or not given.
OrAuto = Annotated[_Value, "auto"] | None


@dataclass(frozen=True)
class Recipe:
    """Settings that affect learning and that every algorithm has."""

    on_policy: ClassVar[bool] = True  # an iteration learns only from its own rollout

    algo: AlgorithmName = field(init=False)
    """Learning algorithm; `--algo NAME --help` shows its settings."""
    n_envs: int = 1
    """Number of parallel environments."""
    n_steps: int = 2048
    """Steps per environment per iteration; an iteration collects n_envs × n_steps transitions."""
    batch_size: int | Literal["auto"] = 64
    """Minibatch size."""
    net_arch: tuple[int, ...] = (64, 64)
    """Hidden layer widths."""
    activation: Activation = "tanh"
    """Activation function of the hidden layers."""
    encoder: ImageEncoderName = "nature"
    """CNN of images: nature (Mnih et al. 2015), or impala, a larger residual network (Espeholt et al. 2018)."""
    network: str | None = None
    """Custom network, as module:callable; see docs/networks.md."""
    learning_rate: float = 3e-4
    """Learning rate."""
    lr_schedule: Schedule = "constant"
    """linear: anneal the learning rate to 0 over the run."""
    optimizer: OptimizerName = "adam"
    """Optimiser of the networks."""
    adam_eps: float = 1e-8
    """Epsilon of Adam, AdamW and RMSprop."""
    adam_betas: tuple[float, ...] = (0.9, 0.999)
    """Decay rates β₁ and β₂ of Adam and AdamW."""
    rmsprop_alpha: float = 0.99
    """Decay rate α of RMSprop."""
    momentum: float = 0.0
    """Momentum of RMSprop and SGD."""
    weight_decay: OrAuto[float] = None
    """Weight decay, an L2 penalty except for AdamW, where it is decoupled; auto: 0.01 for AdamW, else 0."""
    max_grad_norm: float = 0.5
    """Clip gradients to this norm; inf: no clipping."""
    gamma: float = 0.99
    """Discount factor."""
    discretize: int | None = None
    """Bins per dimension to discretise Box actions into; none: keep them continuous."""
    action_masks: bool = True
    """Use the action masks that the environment gives."""
    overlap: Literal["auto", "off", "strict"] = "auto"
    """strict: collect while learning, one update behind."""
    precision: Literal["bf16", "tf32", "fp32"] = "tf32"
    """Precision of matrix products on CUDA; sums are in fp32, and the CPU always uses fp32."""

    @property
    def total_batch(self) -> int:
        """Transitions per iteration."""
        return self.n_envs * self.n_steps

    @property
    def weight_decay_factor(self) -> float:
        """The weight decay; PyTorch's default if it is auto."""
        if self.weight_decay is not None:
            return self.weight_decay
        return 0.01 if self.optimizer == "adamw" else 0.0

    # Defaults of what only some algorithms have, for code shared by all of them.

    @property
    def n_tasks(self) -> int:
        """Number of tasks."""
        return 1

    @property
    def recurrent(self) -> str:
        """Recurrent layer of the policy."""
        return "none"

    @property
    def obs_groups(self) -> tuple[str, ...] | None:
        """Observation keys that the actor or critic uses; () if one of them uses all, None if both do."""
        return None

    @property
    def normalize_obs(self) -> bool:
        """Whether observations are normalised."""
        return False

    @property
    def updates_per_iteration(self) -> float:
        """Gradient updates in one iteration."""
        raise NotImplementedError

    @property
    def update_schedule(self) -> str:
        """Description of the update schedule, such as `10 epochs`."""
        raise NotImplementedError


@dataclass(frozen=True)
class PPORecipe(Recipe):
    """PPO (Schulman et al. 2017); the defaults are Stable-Baselines3's."""

    algo: AlgorithmName = field(default="ppo", init=False)
    """Learning algorithm; `--algo NAME --help` shows its settings."""
    batch_size: int | Literal["auto"] = 64
    """Minibatch size, a divisor of n_envs × n_steps; auto: the largest divisor up to the preset's batch size."""
    n_epochs: int = 10
    """Passes over each rollout."""
    critic_arch: OrAuto[tuple[int, ...]] = None
    """Hidden layer widths of the critic; auto: same as the actor."""
    share_trunk: bool = False
    """Share the hidden layers between actor and critic."""
    recurrent: Literal["none", "gru", "lstm"] = "none"
    """Recurrent layer before the hidden layers."""
    recurrent_size: int = 128
    """Width of the recurrent layer."""
    actor_obs: OrAuto[tuple[str, ...]] = None
    """Keys of a Dict observation that the actor sees, such as policy; auto: all."""
    critic_obs: OrAuto[tuple[str, ...]] = None
    """Keys that the critic sees, such as policy,privileged; auto: all."""
    adam_eps: float = 1e-5
    """Epsilon of Adam, AdamW and RMSprop."""
    gae_lambda: float = 0.95
    """λ of generalised advantage estimation (GAE)."""
    clip_range: float = 0.2
    """Clip range ε of the probability ratio."""
    clip_schedule: Schedule = "constant"
    """linear: anneal the clip range to 0 over the run."""
    clip_range_vf: float | None = None
    """Clip range of the value function; none: no clipping."""
    ent_coef: float = 0.0
    """Entropy bonus coefficient."""
    vf_coef: float = 0.5
    """Value loss coefficient."""
    target_kl: float | None = None
    """Stop the epochs of an iteration once the approximate KL exceeds 1.5 × this; none: never."""
    normalize_advantage: bool = True
    """Normalise advantages per minibatch."""
    normalize_obs: bool = False
    """Normalise observations by their running mean and variance."""
    normalize_reward: bool = False
    """Divide rewards by the running standard deviation of the discounted return."""
    ortho_init: bool = True
    """Orthogonal initial weights and a small output layer of the actor; otherwise PyTorch's default."""
    log_std_init: float = 0.0
    """Initial log standard deviation of Gaussian actions, in units of half the action range."""
    use_sde: bool = False
    """Generalised state-dependent exploration (gSDE): noise that is a function of the state; see docs/spaces.md."""
    sde_sample_freq: int | None = None
    """With use_sde: draw a new exploration matrix every this many steps of an iteration; none: only at its start."""
    use_expln: bool = False
    """With use_sde: above 1, standard deviations grow with the logarithm of their parameter, not exponentially."""
    action_distribution: Literal["gaussian", "squashed", "beta"] = "gaussian"
    """Distribution of continuous actions; squashed (tanh) and beta need bounded actions, and never clip them."""
    overlap: Literal["auto", "off", "strict"] = "auto"
    """strict: collect while learning, one update behind; auto: strict with a GPU and 48 or more environments."""

    @property
    def critic_widths(self) -> tuple[int, ...]:
        """Hidden layer widths of the critic."""
        return self.net_arch if self.critic_arch is None else self.critic_arch

    @property
    def updates_per_iteration(self) -> float:
        """Gradient updates in one iteration."""
        assert isinstance(self.batch_size, int)
        return self.n_epochs * self.total_batch / self.batch_size

    @property
    def update_schedule(self) -> str:
        """Description of the update schedule, such as `10 epochs`."""
        return f"{self.n_epochs} epochs"

    @property
    def obs_groups(self) -> tuple[str, ...] | None:
        """Observation keys that the actor or critic uses; () if one of them uses all, None if both do."""
        if self.actor_obs is None and self.critic_obs is None:
            return None
        return () if self.actor_obs is None or self.critic_obs is None else (*self.actor_obs, *self.critic_obs)


@dataclass(frozen=True)
class OffPolicyRecipe(Recipe):
    """Settings of all algorithms with a replay buffer."""

    on_policy: ClassVar[bool] = False

    n_envs: int = 8
    """Number of parallel environments."""
    n_steps: int = 8
    """Steps per environment per iteration; updates run after each n_envs × n_steps transitions."""
    batch_size: int = 256
    """Transitions sampled per gradient update."""
    activation: Activation = "relu"
    """Activation function of the hidden layers."""
    buffer_size: int = 1_000_000
    """Capacity of the replay buffer, in transitions."""
    learning_starts: int = 1000
    """Steps with random actions before the first update."""
    utd_ratio: float = 1.0
    """Update-to-data ratio: gradient updates per environment step."""
    tau: float = 0.005
    """Polyak coefficient of the target networks; 1: hard update."""
    n_step: int = 1
    """n of the n-step return."""
    random_shift: int = 0
    """Shift each sampled image at random by up to this many pixels, repeating its border (DrQ: 4); 0: off."""
    per: bool = False
    """Prioritised replay: sample by TD error."""
    per_alpha: float = 0.6
    """Prioritisation exponent α; 0: uniform sampling."""
    per_beta: float = 0.4
    """Initial importance-sampling exponent β; annealed to 1 over the run."""
    overlap: Literal["auto", "off", "strict"] = "auto"
    """strict: collect while learning, one iteration behind; auto: off."""
    precision: Literal["tf32", "fp32"] = "tf32"
    """Precision of matrix products on CUDA; the CPU always uses fp32."""

    @property
    def updates_per_iteration(self) -> float:
        """Gradient updates in one iteration."""
        return self.utd_ratio * self.total_batch

    @property
    def update_schedule(self) -> str:
        """Description of the update schedule."""
        updates = "1 update" if self.utd_ratio == 1 else f"{self.utd_ratio:g} updates"
        return f"{updates} per step, replay buffer of {self.buffer_size:,} transitions"


@dataclass(frozen=True)
class OffPolicyActorCriticRecipe(OffPolicyRecipe):
    """Settings of off-policy algorithms with an actor and critics."""

    net_arch: tuple[int, ...] = (256, 256)
    """Hidden layer widths of the actor."""
    critic_arch: OrAuto[tuple[int, ...]] = None
    """Hidden layer widths of the critics; auto: same as the actor."""
    n_critics: int = 2
    """Number of critics; the target uses their minimum."""
    action_limit: float = 1.0
    """Range of action numbers without bounds: ±this, or twice this from the only bound."""
    max_grad_norm: float = float("inf")
    """Clip gradients to this norm; inf: no clipping."""

    @property
    def critic_widths(self) -> tuple[int, ...]:
        """Hidden layer widths of the critics."""
        return self.net_arch if self.critic_arch is None else self.critic_arch


@dataclass(frozen=True)
class SACRecipe(OffPolicyActorCriticRecipe):
    """Soft actor-critic (Haarnoja et al. 2018), for Box and Discrete actions."""

    algo: AlgorithmName = field(default="sac", init=False)
    """Learning algorithm; `--algo NAME --help` shows its settings."""
    ent_coef: float | Literal["auto"] = "auto"
    """Entropy coefficient (temperature); auto: learned."""
    ent_coef_init: float = 1.0
    """Initial value of a learned ent_coef."""
    target_entropy: OrAuto[float] = None
    """Target entropy of a learned ent_coef; auto: -dim(action) for Box, 0.98 × log(n) for Discrete actions."""
    weight_init: Literal["torch", "he"] = "torch"
    """Weight initialisation: PyTorch's default, or He uniform with zero biases and small output layers."""
    use_sde: bool = False
    """Generalised state-dependent exploration (gSDE): noise that is a function of the state; see docs/spaces.md."""
    sde_sample_freq: int | None = None
    """With use_sde: draw a new exploration matrix every this many steps of an iteration; none: only at its start."""
    use_expln: bool = False
    """With use_sde: above 1, standard deviations grow with the logarithm of their parameter, not exponentially."""
    log_std_init: float = -3.0
    """With use_sde: initial log standard deviation of the exploration matrix's entries."""
    use_sde_at_warmup: bool = False
    """With use_sde: explore with it during the first learning_starts steps too, not uniformly."""
    value_limit: float | None = None
    """Clip Q values and targets in the critic loss to ±this; none: no clipping."""
    n_tasks: int = 1
    """Number of tasks, one-hot at the end of the observation; each has its own head, ent_coef and replay buffer."""


@dataclass(frozen=True)
class TD3Recipe(OffPolicyActorCriticRecipe):
    """Twin delayed DDPG (Fujimoto et al. 2018), for Box actions."""

    algo: AlgorithmName = field(default="td3", init=False)
    """Learning algorithm; `--algo NAME --help` shows its settings."""
    net_arch: tuple[int, ...] = (400, 300)
    """Hidden layer widths of the actor."""
    learning_rate: float = 1e-3
    """Learning rate."""
    learning_starts: int = 100
    """Steps with random actions before the first update."""
    policy_delay: int = 2
    """Critic updates per update of the actor and the target networks."""
    target_policy_noise: float = 0.2
    """Standard deviation of the noise on target actions (target policy smoothing)."""
    target_noise_clip: float = 0.5
    """Clip range of the noise on target actions."""
    exploration_noise: float = 0.1
    """Standard deviation of the exploration noise, in units of half the action range."""


@dataclass(frozen=True)
class DQNRecipe(OffPolicyRecipe):
    """Deep Q-learning (Mnih et al. 2015), for Discrete and MultiDiscrete actions."""

    algo: AlgorithmName = field(default="dqn", init=False)
    """Learning algorithm; `--algo NAME --help` shows its settings."""
    batch_size: int = 64
    """Transitions sampled per gradient update."""
    learning_rate: float = 1e-3
    """Learning rate."""
    max_grad_norm: float = 10.0
    """Clip gradients to this norm; inf: no clipping."""
    buffer_size: int = 100_000
    """Capacity of the replay buffer, in transitions."""
    tau: float = 1.0
    """Polyak coefficient of the target network; 1: hard update."""
    target_update_interval: int = 128
    """Gradient updates between target network updates."""
    double_dqn: bool = True
    """Double DQN: the online network selects the action, the target network evaluates it."""
    dueling: bool = False
    """Dueling network: separate streams for state value and advantages."""
    exploration_final_eps: float = 0.04
    """Final ε of the ε-greedy exploration."""
    exploration_fraction: float = 0.16
    """Fraction of the run over which ε falls from 1 to its final value."""


RECIPES: dict[AlgorithmName, type[Recipe]] = {"ppo": PPORecipe, "sac": SACRecipe, "td3": TD3Recipe, "dqn": DQNRecipe}


@dataclass(frozen=True)
class Engine:
    """Settings that affect only speed."""

    device: str = "auto"
    """Device of the networks: auto, cpu, cuda, or cuda:1 for the second GPU."""
    subproc: OrAuto[bool] = None
    """Step environments in worker processes; auto: decided by timing a few steps."""
    workers: OrAuto[int] = None
    """Worker processes; auto: one per core, minus one with a GPU or overlap; fewer if as fast, or beside other runs."""
    slices: OrAuto[int] = None
    """Groups of environments per worker; one steps while another waits for actions. auto: 2, or 1 if that is enough."""
    pin_cores: OrAuto[bool] = None
    """Pin worker processes to cores, round-robin; auto: if the workers take all cores or all but one."""
    compile: bool = False
    """Compile the step of device environments: up to a minute at the start, then fewer kernels per step."""
    graphs: bool = True
    """Run inference and learning as CUDA graphs instead of launching each kernel from Python."""
    threads: int = 1
    """PyTorch threads in the training process."""
    env_timeout: float | None = 300.0
    """Seconds after which a worker that is stuck in a step is restarted; none: never."""
    eval_workers: OrAuto[int] = None
    """Processes for evaluation during training; 0: training waits. auto: by cores and episodes; 0 with one core."""
    rank_timeout: float = 1800.0
    """Seconds a rank waits for the others before the job is aborted."""
    max_env_restarts: int = 10
    """Consecutive faults of one environment, with no episode completed in between, before the run stops."""


@dataclass(frozen=True)
class Run:
    """What to train, for how long, and where to save the results."""

    env: str = ""
    """Gymnasium ID, or module:callable that returns an environment; required."""
    env_kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments for the environment, as YAML: '{continuous: true}'."""
    wrappers: tuple[str | dict[str, Any], ...] = ()
    """Wrappers of the environment, innermost first: --wrapper module:callable, which may be repeated."""
    frame_stack: int = 1
    """Observe the latest N observations together: images along their channels, vectors along the last axis."""
    init_from: str | None = None
    """Run folder or checkpoint file whose policy (and critics) a new run starts from; none: random weights."""
    timesteps: int = 1_000_000
    """Total environment steps, over all environments."""
    seed: int = 0
    """Random seed."""
    run_name: str | None = None
    """Name of the run folder; none: env, algorithm, preset and seed."""
    runs_dir: str = "runs"
    """Parent folder of the run folders."""
    preset: str | None = None
    """Preset that gives the defaults; see `unidle presets`."""
    allow_recipe_change: bool = False
    """Allow changes to a preset that reproduces published results; with `unidle tune`: try recipe changes too."""
    eval_every: OrAuto[int] = None
    """Steps between evaluations in separate environments; auto: a tenth of the run. 0: never."""
    eval_episodes: int = 10
    """Episodes per evaluation."""
    eval_max_steps: OrAuto[int] = None
    """Steps after which an evaluation episode is cut off; auto: depends on the time limit, see docs/evaluation.md."""
    target_return: float | None = None
    """Stop the run once an evaluation reaches this mean return."""
    checkpoint_every: OrAuto[int] = None
    """Steps between checkpoints; auto: a twentieth of the run, or more if saving is slow."""
    keep_checkpoints: int = 2
    """Number of latest checkpoints to keep, in addition to the best."""
    save_replay_buffer: bool = True
    """Off-policy algorithms: store the replay buffer in checkpoints; without it, a resumed run first refills it."""
    tensorboard: bool = True
    """Write TensorBoard events."""
    wandb: bool = False
    """Log to Weights & Biases (extra `wandb`; WANDB_MODE=offline works)."""
    cleanrl_tags: bool = False
    """Write TensorBoard and W&B metrics also under CleanRL's tags (charts/episodic_return, charts/SPS, …)."""
    log_info: tuple[str, ...] = ()
    """Numbers in info to log at the end of each episode, such as success,x; not for device or vector environments."""
    monitor_csv: bool = False
    """Write one row per episode to monitor.csv, in the form of Stable-Baselines3's Monitor."""
    trace: bool = False
    """Profile a few iterations into trace.json.gz, for ui.perfetto.dev."""

    @property
    def env_wrappers(self) -> tuple[str | dict[str, Any], ...]:
        """`wrappers`, and around them the one that stacks frames."""
        stack = {"unidle.envs.frame_stack:FrameStack": {"n": self.frame_stack}}
        return (*self.wrappers, stack) if self.frame_stack > 1 else self.wrappers

    @property
    def evaluation_interval(self) -> int:
        """Steps between evaluations; 0: never."""
        return max(1, self.timesteps // 10) if self.eval_every is None else self.eval_every


def round_up_timesteps(timesteps: int, total_batch: int) -> int:
    """`timesteps` rounded up to whole iterations: the steps after which a run ends."""
    return -(-timesteps // total_batch) * total_batch
