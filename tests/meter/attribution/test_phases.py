"""`unidle.phase` and `PhaseMeter`: time per phase, nesting, threads, and overhead."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

import unidle
from unidle.meter.attribution import phases
from unidle.meter.sensors.background import means_by_phase
from unidle.meter.sensors.reading import Sample


@pytest.fixture
def meter() -> Iterator[phases.PhaseMeter]:
    with unidle.PhaseMeter(readings=False) as meter:
        yield meter


def seconds(meter: phases.PhaseMeter) -> dict[str, float]:
    return {row.phase: row.seconds for row in meter.rows()}


def test_time_counts_for_innermost_phase_and_shares_sum_to_one(meter: phases.PhaseMeter) -> None:
    with unidle.phase("rollout"):
        time.sleep(0.02)
        with unidle.phase("environment"):
            time.sleep(0.05)
        time.sleep(0.02)
    time.sleep(0.03)
    meter.stop()
    found = seconds(meter)
    assert 0.04 <= found["rollout"] < found["environment"] + 0.04
    assert found["environment"] >= 0.05
    assert found["unattributed"] >= 0.03
    assert sum(row.share for row in meter.rows()) == pytest.approx(1)
    assert str(meter).splitlines()[-1].split()[:2] == ["100.0", "%"]


def test_phase_ends_when_its_block_raises(meter: phases.PhaseMeter) -> None:
    with pytest.raises(ValueError, match="mine"), unidle.phase("rollout"):
        raise ValueError("mine")
    time.sleep(0.02)
    meter.stop()
    assert seconds(meter)["rollout"] < 0.02 <= seconds(meter)["unattributed"]


def test_phases_of_other_threads_are_separate(meter: phases.PhaseMeter) -> None:
    def other() -> None:
        with unidle.phase("learn"):
            time.sleep(0.1)

    thread = threading.Thread(target=other, name="learner")
    with unidle.phase("rollout"):
        thread.start()
        time.sleep(0.05)
    thread.join()
    meter.stop()
    found = seconds(meter)  # the table covers the thread that created the meter
    assert "learn" not in found
    assert 0.05 <= found["rollout"] < 0.1 <= found["rollout"] + found["unattributed"]


def test_phase_without_meter_is_a_no_op() -> None:
    assert unidle.phase("rollout") is unidle.phase("learn")
    with unidle.phase("rollout"):
        pass


def test_second_active_meter_raises(meter: phases.PhaseMeter) -> None:
    with pytest.raises(unidle.UsageError, match="already active"), unidle.PhaseMeter(readings=False):
        pass


def test_meter_cannot_be_reused() -> None:
    meter = unidle.PhaseMeter(readings=False)
    assert meter.rows() == []
    with meter, unidle.phase("rollout"):
        pass
    before = meter.rows()
    with pytest.raises(unidle.UsageError, match="create a new one"), meter:
        pass
    assert unidle.phase("rollout") is unidle.phase("learn")  # no meter is active
    assert meter.rows() == before


def test_stopping_meter_ends_open_phases() -> None:
    meter = unidle.PhaseMeter(readings=False)
    meter.start()
    with unidle.phase("rollout"):
        meter.stop()
        before = meter.rows()
        time.sleep(0.01)
    assert meter.rows() == before


def test_phase_costs_about_a_microsecond() -> None:
    """The bounds leave room for a busy machine."""

    def cost_us() -> float:
        best = float("inf")
        for _ in range(5):
            begun = time.thread_time()
            for _ in range(20_000):
                with phases.phase("rollout"):
                    pass
            best = min(best, time.thread_time() - begun)
        return best / 20_000 * 1e6

    idle = cost_us()
    with unidle.PhaseMeter(readings=False):
        active = cost_us()
    print(f"a phase costs {idle:.2f} µs without a meter, {active:.2f} µs with one")
    assert idle < 1
    assert active < 5


def test_means_weight_samples_by_time_they_cover() -> None:
    samples = [Sample(0, 999.0), Sample(10, 100.0), Sample(20, 200.0)]
    # Phase 1 has five units in the first sample's segment and ten in the second's; phase 2 has no samples.
    means = means_by_phase([(1, 5, 20), (2, 20, 30), (1, -5, 0)], samples)
    assert means == {1: pytest.approx((5 * 100 + 10 * 200) / 15)}


def test_phase_does_not_import_torch() -> None:
    program = "import sys, unidle; unidle.phase('a'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0
