"""Samples become a table and a verdict: the arithmetic, and which samples lead to which cause."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unidle.meter.sensors.lifetime import LifetimeStats
from unidle.meter.sensors.reading import Sample
from unidle.meter.watch.findings import Findings, analyse
from unidle.meter.watch.places import place_of
from unidle.meter.watch.samples import Frame, KernelActivity, Process, Stack
from unidle.meter.watch.stacks import activity
from unidle.meter.watch.verdict import CAUSES, verdict_on
from unidle.report.terminal.watch import _table

SECOND = 10**9
PACKAGES = "/lib/python3.11/site-packages"
MAIN = Frame("/home/me/train.py", "<module>", False)
STEP = Frame("/home/me/game.py", "Game.step", True)
THINK = Frame("/home/me/game.py", "Game.think", False)
COLLECT = Frame(
    f"{PACKAGES}/stable_baselines3/common/on_policy_algorithm.py", "OnPolicyAlgorithm.collect_rollouts", False
)
TRAIN = Frame(f"{PACKAGES}/stable_baselines3/ppo/ppo.py", "PPO.train", False)
FORWARD = Frame(f"{PACKAGES}/torch/nn/modules/linear.py", "Linear.forward", False)
BACKWARD = Frame(f"{PACKAGES}/torch/_tensor.py", "Tensor.backward", False)
IMPORT = Frame("<frozen importlib._bootstrap>", "_find_and_load", False)
SAVE = Frame(f"{PACKAGES}/torch/serialization.py", "save", False)
BOOTSTRAP = Frame("/lib/python3.11/multiprocessing/process.py", "BaseProcess._bootstrap", False)
RECV = Frame("/lib/python3.11/multiprocessing/connection.py", "Connection._recv", False)
SOCKET = Frame("/lib/python3.11/socket.py", "SocketIO.readinto", False)
ALL = [MAIN, STEP, THINK, COLLECT, TRAIN, FORWARD, BACKWARD, IMPORT, SAVE, BOOTSTRAP, RECV, SOCKET]


def stack(*frames: Frame, wall: float = 1.0, busy: float = 1.0, known: float = 0.0, active: float = 0.0) -> Stack:
    """A stack given from the outermost frame; `busy` is its share of time on a core."""
    return Stack(0, tuple(reversed(frames)), wall, wall * busy, 0.0, known, active)


def process(
    *stacks: Stack, worker: bool = False, cuda: bool = False, kernel_activity: KernelActivity | None = None
) -> Process:
    cpu = sum(s.on_core for s in stacks)
    last_ns = round(sum(s.wall for s in stacks) * SECOND)
    return Process(1, worker, (), 0, last_ns, last_ns, cpu, 1, True, cuda, kernel_activity, stacks)


def found(*processes: Process, seconds: float = 10.0, utilisation: float | None = None) -> Findings:
    gpu = None if utilisation is None else life((0, 100 * utilisation), (seconds, 0))
    return analyse(processes, 0, round(seconds * SECOND), 4, gpu)


def life(*samples: tuple[float, float]) -> LifetimeStats:
    """Lifetime statistics of a GPU from (second, utilisation) pairs."""
    whole = LifetimeStats()
    whole.add([Sample(round(at * SECOND), value) for at, value in samples])
    return whole


@pytest.mark.parametrize(
    ("frames", "expected_activity", "expected_function"),
    [
        ((MAIN, COLLECT, STEP, THINK), "environment", "Game.think"),
        ((MAIN, COLLECT, STEP, FORWARD), "environment", "Game.step"),
        ((MAIN, COLLECT, FORWARD), "inference", "OnPolicyAlgorithm.collect_rollouts"),
        ((MAIN, COLLECT), "rollout (other)", "OnPolicyAlgorithm.collect_rollouts"),
        ((MAIN, COLLECT, THINK), "user code", "Game.think"),
        ((MAIN, TRAIN, FORWARD), "learning", "PPO.train"),
        ((MAIN, BACKWARD), "learning", "train.py"),
        ((MAIN, FORWARD), "forward pass", "train.py"),
        ((MAIN, SAVE), "logging and checkpoints", "save"),
        ((MAIN, IMPORT, MAIN), "start-up and exit", "train.py"),
        ((MAIN, RECV), "waiting", "train.py"),
        ((MAIN,), "user code", "train.py"),
    ],
)
def test_activity_and_function_of_a_stack(
    frames: tuple[Frame, ...], expected_activity: str, expected_function: str
) -> None:
    assert activity(stack(*frames), False) == expected_activity
    place = place_of([stack(*frames)], expected_activity)
    assert place is not None
    assert place.function == expected_function


shares = st.floats(0, 1)
stacks = st.builds(
    lambda frames, wall, busy, known, active: stack(
        *frames, wall=wall, busy=busy, known=wall * known, active=wall * known * active
    ),
    st.lists(st.sampled_from(ALL), min_size=1, max_size=6),
    st.floats(0, 30),
    shares,
    shares,
    shares,
)
computings = st.none() | st.builds(
    KernelActivity, st.integers(1, 9), st.just(1.0), shares, st.none() | st.floats(0.1, 99)
)
processes = st.builds(
    lambda many, worker, cuda, kernel_activity: process(
        *many, worker=worker, cuda=cuda, kernel_activity=kernel_activity
    ),
    st.lists(stacks, max_size=5),
    st.booleans(),
    st.booleans(),
    computings,
)


@given(st.lists(processes, max_size=4), st.floats(0.1, 100), st.none() | shares)
def test_table_sums_to_one_and_has_a_verdict_for_any_samples(
    many: list[Process], seconds: float, utilisation: float | None
) -> None:
    findings = found(*many, seconds=seconds, utilisation=utilisation)
    whole = (findings.busy or 0.0) + sum(findings.idle.values()) + findings.unattributed
    assert whole == pytest.approx(1)
    assert min([findings.unattributed, *findings.idle.values()]) >= 0
    verdict = verdict_on(findings)
    assert verdict.cause in CAUSES
    assert verdict.sentence.endswith(".")
    assert verdict.next_step.endswith(".")


def test_busy_is_time_share_times_active_share() -> None:
    gpu = process(
        stack(MAIN, STEP, wall=6.0, known=1.0, active=0.1),
        stack(MAIN, BACKWARD, wall=3.0, known=1.0, active=0.8),
        stack(MAIN, SAVE, wall=1.0),
        cuda=True,
        kernel_activity=KernelActivity(4, 1.0, 0.3, 20.0),
    )
    findings = found(gpu, utilisation=0.4)
    assert findings.busy == pytest.approx(0.6 * 0.1 + 0.3 * 0.8)
    assert findings.idle["environment"] == pytest.approx(0.6 * 0.9)
    assert findings.unattributed == pytest.approx(0.1)
    assert findings.disagreement == pytest.approx(0.1)
    verdict = verdict_on(findings)
    assert verdict.cause == "environment computes"
    assert verdict.sentence.startswith("GPU idle 67 %: 90 % of that in `Game.step` (environment, game.py)")


def test_without_windows_startup_is_idle_and_other_rows_share_the_mean() -> None:
    learns = process(
        stack(MAIN, IMPORT, MAIN, wall=4.0),
        stack(MAIN, BACKWARD, wall=4.0),
        stack(MAIN, STEP, wall=2.0),
        cuda=True,
    )
    findings = found(learns, utilisation=0.3)
    assert findings.busy == pytest.approx(0.3)
    assert findings.idle == pytest.approx({"environment": 0.1, "learning": 0.2, "start-up and exit": 0.4})
    assert findings.unattributed == pytest.approx(0)
    busier = found(learns, utilisation=0.9)
    assert busier.idle == pytest.approx({"environment": 0.0, "learning": 0.0, "start-up and exit": 0.1})
    assert verdict_on(busier).cause == "compute-bound"


def test_driver_readings_give_busy_and_idle_per_row() -> None:
    many = process(
        stack(MAIN, IMPORT, MAIN, wall=2.0, known=2.0),
        stack(MAIN, COLLECT, STEP, wall=3.0, known=2.5, active=0.1),
        stack(MAIN, COLLECT, FORWARD, wall=2.0, known=2.0, active=0.4),
        stack(MAIN, TRAIN, wall=3.0, known=2.5, active=2.25),
        cuda=True,
    )
    many = replace(many, has_driver_readings=True)
    findings = found(many, utilisation=0.25)
    assert findings.busy_source == "driver"
    assert findings.busy == pytest.approx(0.3 * 0.04 + 0.2 * 0.2 + 0.3 * 0.9)
    idle = {"environment": 0.3 * 0.96, "inference": 0.2 * 0.8, "learning": 0.3 * 0.1, "start-up and exit": 0.2}
    assert findings.idle == pytest.approx(idle)
    # With one mean for all rows, learning would be as idle as stepping.
    assert verdict_on(findings).sentence.startswith("GPU idle 60 %: 60 % of that in `Game.step` (environment, game.py)")


def test_cause_is_largest_row_and_unknown_forward_pass_counts_as_learning() -> None:
    rows = [stack(MAIN, STEP, wall=4.0), stack(MAIN, COLLECT, FORWARD, wall=3.0), stack(MAIN, BACKWARD, wall=3.0)]
    assert verdict_on(found(process(*rows))).cause == "environment computes"
    own_loop = [stack(MAIN, STEP, wall=4.0), stack(MAIN, FORWARD, wall=3.5), stack(MAIN, BACKWARD, wall=2.5)]
    assert (
        "60 % of the main process's time in `train.py` (forward pass)" in verdict_on(found(process(*own_loop))).sentence
    )


def test_rows_share_driver_mean_without_readings_for_leading_thread() -> None:
    before_cuda = process(stack(MAIN, STEP, wall=5.0, known=1.0), stack(MAIN, BACKWARD, wall=5.0), cuda=True)
    threaded = replace(
        process(stack(MAIN, RECV, wall=10.0, busy=0.0, known=10.0, active=8.0), cuda=True),
        has_driver_readings=True,
    )
    busy = tuple(replace(s, thread=7) for s in before_cuda.stacks)
    for one in (before_cuda, replace(threaded, stacks=(*threaded.stacks, *busy))):
        findings = found(one, utilisation=0.8)
        assert (findings.busy_source, findings.busy) == ("driver, mean", pytest.approx(0.8))
        assert findings.idle["environment"] == pytest.approx(0.1)


def test_verdict_ignores_time_without_samples() -> None:
    silent = process(stack(MAIN, IMPORT, wall=1.0, known=1.0), stack(MAIN, STEP, wall=3.0, known=3.0), cuda=True)
    silent = replace(silent, closed_ns=10 * SECOND, has_driver_readings=True, failure="RuntimeError()")
    assert verdict_on(found(silent, utilisation=0.1)).sentence.startswith(
        "GPU idle 100 %: 100 % of that in `Game.step`"
    )
    early = replace(silent, stacks=silent.stacks[:1])
    verdict = verdict_on(found(early, utilisation=0.1))
    assert verdict.cause == "no samples"
    assert "failed" in verdict.sentence


def test_gpu_busy_while_in_use_is_compute_bound() -> None:
    # 4 s of imports; then the driver takes 1 s to start, which looks like learning in the stacks.
    learns = process(stack(MAIN, IMPORT, MAIN, wall=4.0), stack(MAIN, BACKWARD, wall=6.0), cuda=True)

    def verdict_of(gpu: LifetimeStats) -> str:
        return verdict_on(analyse([learns], 0, 10 * SECOND, 4, gpu)).cause

    assert verdict_of(life((0, 0), (5, 95), (9, 99), (9.9, 0), (10, 0))) == "compute-bound"
    assert verdict_of(life((0, 0), (3.9, 100), (10, 100))) == "compute-bound"
    assert verdict_of(life((0, 0), (5, 80), (9.9, 0), (10, 0))) == "small batches"
    assert verdict_of(life((0, 0), (5, 95), (9, 0), (10, 0))) == "small batches"  # busy, but not for long enough
    assert verdict_of(life((0, 0), (10, 0))) == "small batches"


def test_in_use_spans_first_to_last_positive_utilisation() -> None:
    assert life((0, 0), (10, 0)).in_use is None
    assert life((0, 50)).in_use is None  # one sample has no duration
    assert life((0, 0), (2, 50), (4, 0), (6, 100), (7, 0), (9, 0)).in_use == pytest.approx((5.0, 40.0))


def test_time_after_last_sample_is_unattributed() -> None:
    silent = process(stack(MAIN, STEP, wall=4.0))
    findings = found(replace(silent, closed_ns=9 * SECOND))
    assert findings.idle == pytest.approx({"environment": 0.4, "start-up and exit": 0.1})
    assert findings.unattributed == pytest.approx(0.5)


def test_table_and_verdict_are_about_the_time_after_start_up() -> None:
    stacks = stack(MAIN, IMPORT, wall=6.0), stack(MAIN, STEP, wall=3.0), stack(MAIN, BACKWARD, wall=1.0)
    findings = found(process(*stacks))
    *rows, total, start = _table(findings)
    assert "75 % of the main process's time in `Game.step`" in verdict_on(findings).sentence
    assert [re.findall(r"(\S+) +(\d+) %", row)[0] for row in rows[1:]] == [
        ("environment", "75"),
        ("learning", "25"),
        ("unattributed", "0"),
    ]
    assert total.split() == ["100", "%"]
    assert start == "start-up and exit: 6.0 s, not counted above"


def gpu_learner(active: float, kernel_us: float) -> Process:
    learning = stack(MAIN, BACKWARD, wall=10.0, known=1.0, active=active)
    return process(learning, cuda=True, kernel_activity=KernelActivity(4, 1.0, active, kernel_us))


def worker(*many: Stack) -> Process:
    return process(*[replace(s, frames=(*s.frames, BOOTSTRAP)) for s in many], worker=True)


SENDING_LEADER = process(stack(MAIN, COLLECT, STEP, RECV, wall=9.0, busy=0.9), stack(MAIN, TRAIN, wall=1.0))
WAITING_LEADER = process(stack(MAIN, COLLECT, STEP, RECV, wall=9.0, busy=0.05), stack(MAIN, TRAIN, wall=1.0))
# As SENDING_LEADER, but with contention for cores.
CONTENDED_LEADER = replace(
    SENDING_LEADER, stacks=tuple(replace(s, on_core=0.3 * s.wall, queued=0.6 * s.wall) for s in SENDING_LEADER.stacks)
)
CASES = [
    ("compute-bound", [gpu_learner(0.97, 300.0)]),
    ("small batches", [gpu_learner(0.2, 3.0)]),
    ("small batches", [process(stack(MAIN, TRAIN, wall=10.0, known=1.0, active=0.1))]),
    ("compute-bound", [process(stack(MAIN, TRAIN, wall=10.0, known=1.0, active=0.9))]),
    ("environment computes", [process(stack(MAIN, STEP, wall=10.0))]),
    ("environment waits", [process(stack(MAIN, STEP, wall=10.0, busy=0.01))]),
    ("environment computes", [WAITING_LEADER, worker(stack(STEP, wall=8.0), stack(RECV, wall=2.0, busy=0.1))]),
    ("environment waits", [WAITING_LEADER, worker(stack(STEP, wall=8.0, busy=0.02), stack(RECV, wall=2.0, busy=0.1))]),
    (
        "messages to workers",
        [WAITING_LEADER, worker(stack(STEP, wall=0.1), stack(MAIN, wall=1.0), stack(RECV, wall=9.0))],
    ),
    ("messages to workers", [WAITING_LEADER, worker(stack(RECV, wall=10.0, busy=0.1))]),  # no stepping was sampled
    ("messages to workers", [WAITING_LEADER, worker(stack(STEP, wall=0.2, busy=0.1), stack(RECV, wall=9.8, busy=0.1))]),
    (
        "messages to workers",
        [CONTENDED_LEADER, worker(stack(STEP, wall=1.5, busy=0.1), stack(RECV, wall=8.5, busy=0.1))],
    ),
    ("messages to workers", [SENDING_LEADER, worker(stack(STEP, wall=0.5, busy=0.1), stack(RECV, wall=9.5, busy=0.1))]),
    ("environment computes", [SENDING_LEADER, worker(stack(STEP, wall=6.0), stack(RECV, wall=4.0, busy=0.1))]),
    # Half of the time is learning; in the other half the main process busy-waits for workers that step.
    (
        "environment computes",
        [
            process(stack(MAIN, COLLECT, STEP, RECV, wall=5.0), *[stack(MAIN, TRAIN), stack(MAIN, SAVE)] * 2),
            worker(stack(STEP, wall=4.4), stack(RECV, wall=4.6, busy=0.1)),
        ],
    ),
    ("user code", [process(stack(MAIN, THINK, wall=10.0))]),
    ("waiting", [process(stack(MAIN, THINK, wall=10.0, busy=0.05))]),
    ("logging", [process(stack(MAIN, SAVE, wall=10.0))]),
    ("start-up", [process(stack(MAIN, IMPORT, wall=10.0))]),
    ("no samples", []),
]


@pytest.mark.parametrize(("cause", "many"), CASES, ids=[f"{cause} {i}" for i, (cause, _) in enumerate(CASES)])
def test_verdict_names_expected_cause(cause: str, many: list[Process]) -> None:
    assert verdict_on(found(*many)).cause == cause


def test_verdict_names_waiting_for_network() -> None:
    asking = worker(stack(STEP, SOCKET, wall=10.0, busy=0.02))
    assert "waited for the network" in verdict_on(found(WAITING_LEADER, asking)).sentence


def test_many_native_threads_on_few_cores_are_reported() -> None:
    contended = [replace(worker(stack(STEP, wall=10.0)), tasks=16, cpu_seconds=20.0) for _ in range(4)]
    contended = [replace(p, stacks=tuple(replace(s, on_core=3.0, queued=7.0) for s in p.stacks)) for p in contended]
    assert verdict_on(found(WAITING_LEADER, *contended)).cause == "too many threads"


def test_more_torch_threads_than_cores_are_reported_with_fewer_as_advice() -> None:
    for known in (0.1, 0.9):
        learner = process(stack(MAIN, TRAIN, wall=10.0, known=1.0, active=known))
        verdict = verdict_on(found(replace(learner, torch_threads=16)))
        assert verdict.cause == "too many threads"
        assert "with 16 threads of torch on 4 cores" in verdict.sentence
        assert "torch.set_num_threads(4)" in verdict.next_step


@pytest.mark.parametrize(("threads", "advice"), [(None, True), (2, True), (4, False)])
def test_more_torch_threads_are_advised_only_below_the_number_of_cores(threads: int | None, advice: bool) -> None:
    learner = process(stack(MAIN, TRAIN, wall=10.0, known=1.0, active=0.9))
    verdict = verdict_on(found(replace(learner, torch_threads=threads)))
    assert verdict.cause == "compute-bound"
    assert ("more torch threads" in verdict.next_step) == advice


def test_program_has_a_cause_of_its_own_beside_cpu_contention() -> None:
    computing = process(replace(stack(COLLECT, STEP, wall=10.0), on_core=2.0, queued=6.0))
    asleep = process(replace(stack(COLLECT, STEP, wall=10.0), on_core=0.1, queued=0.5))
    for one, first, other in (
        (computing, "CPU contention", "environment computes"),
        (asleep, "environment waits", "CPU contention"),
    ):
        verdict = verdict_on(analyse([one], 0, 10 * SECOND, 4, None, 2.5))
        assert (verdict.cause, [also.cause for also in verdict.also]) == (first, [other])
        assert not any(also.sentence.startswith("No GPU in use:") for also in verdict.also)
    assert not verdict_on(analyse([asleep], 0, 10 * SECOND, 4, None, 1.5)).also


def test_cpu_contention_by_other_programs_is_reported() -> None:
    waiting = process(replace(stack(COLLECT, STEP, wall=10.0), on_core=2.0, queued=6.0))
    for others, cause in ((2.5, "CPU contention"), (1.5, "environment computes"), (None, "environment computes")):
        findings = analyse([waiting], 0, 10 * SECOND, 4, None, others)
        assert verdict_on(findings).cause == cause
    sentence = verdict_on(analyse([waiting], 0, 10 * SECOND, 4, None, 2.5)).sentence
    assert (
        "other programs use 2.5 of 4 cores, and runnable threads spend 75 % of their time waiting for one" in sentence
    )
    for on_core, queued, cause in ((6.0, 2.0, "environment computes"), (0.2, 1.0, "environment waits")):
        one = process(*(replace(s, on_core=on_core, queued=queued) for s in waiting.stacks))
        assert verdict_on(analyse([one], 0, 10 * SECOND, 4, None, 2.5)).cause == cause


def test_worker_shares_exclude_startup_of_leader() -> None:
    leader = process(stack(MAIN, IMPORT, MAIN, wall=8.0), stack(MAIN, COLLECT, STEP, RECV, wall=2.0, busy=0.05))
    many = [worker(stack(RECV, wall=8.0, busy=0.0), stack(STEP, wall=seconds)) for seconds in (1.0, 2.0, 2.0)]
    workers = found(leader, *many).workers  # the first one has no samples of its last second
    assert workers is not None
    assert (workers.count, workers.cores, workers.stepping, workers.working) == pytest.approx((3, 3.0, 1.0, 1.0))


def test_leader_is_only_process_that_uses_gpu() -> None:
    main, helper = process(stack(MAIN, RECV, wall=10.0)), process(stack(BOOTSTRAP, BACKWARD, wall=9.0), worker=True)
    assert found(main, helper).leader is main
    helper = replace(helper, uses_cuda=True)
    assert found(main, helper).leader is helper
    main = replace(main, uses_cuda=True, cpu_seconds=1.0)
    assert found(main, helper).leader is main
