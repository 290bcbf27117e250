"""The report of `unidle diagnose`: a verdict, a table that sums to 100 %, separate measurements, and advice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from unidle.formatting import MISSING, percent, short_time
from unidle.tuning.advice.facts import ON_DEVICE, Facts
from unidle.tuning.advice.finding import Advice
from unidle.tuning.diagnose import Diagnosis

_CROWDED = 0.2  # of the cores
_RECIPE_REMARKS = {
    True: "they change learning: higher GPU use alone does not mean faster learning",
    False: "they change learning: more steps/s alone do not mean faster learning",
}  # by whether there is a GPU


def lines(diagnosis: Diagnosis) -> Iterator[str]:
    """Return the report for a terminal."""
    facts, verdict = diagnosis.facts, diagnosis.verdict
    yield f"{verdict.sentence} ({verdict.basis})"
    others = [finding for finding in verdict.findings if finding.sentence != verdict.sentence]
    yield from (f"Also: {finding.sentence} ({finding.basis})" for finding in others)
    yield ""
    yield from _table(facts)
    yield _training_speed(diagnosis)
    yield ""
    yield from _upper_limits(diagnosis)
    yield from _warnings(facts)
    yield ""
    yield "Engine changes (learning stays the same), by predicted speed-up:"
    yield from _advice(verdict.engine, facts.predictions_are_rough)
    yield ""
    yield f"Recipe changes ({recipe_remark(facts)}):"
    yield from _advice(verdict.recipe, facts.predictions_are_rough)


def recipe_remark(facts: Facts) -> str:
    """Return the caveat about recipe changes."""
    return _RECIPE_REMARKS[facts.profile.on_gpu]


def _table(facts: Facts) -> Iterator[str]:
    table = facts.table
    yield f"{'the GPU' if table.of_gpu else 'trainer thread':<26}{'share':>7}  in training"
    if table.of_gpu:
        yield f"{'busy':<26}{percent(table.busy, 0):>7}"
    for cause, share in table.idle.items():
        yield f"{('idle: ' if table.of_gpu else '') + cause:<26}{percent(share, 0):>7}"
    yield f"{'unattributed':<26}{percent(table.unattributed, 0):>7}"
    yield f"{'':<26}{percent(table.busy + sum(table.idle.values()) + table.unattributed, 0):>7}"


def _training_speed(diagnosis: Diagnosis) -> str:
    tried = f"{diagnosis.iterations} iteration{'s' * (diagnosis.iterations > 1)}{_shortened(diagnosis)}"
    return f"training with these settings: {diagnosis.facts.steps_per_second:,.0f} steps/s, {tried}"


def _upper_limits(diagnosis: Diagnosis) -> Iterator[str]:
    facts, profile = diagnosis.facts, diagnosis.facts.profile
    yield f"{'upper limits':<26}{'steps/s':>10}  each part measured alone"
    for one in profile.stepping:
        by = f"{one.workers} workers" if one.workers > 1 else "1 worker" if one.workers else "no workers"
        yield f"{f'stepping alone, {by}':<26}{profile.steps / one.seconds:>10,.0f}"
    if profile.simulator is not None:
        sizes = [(profile.n_envs, profile.simulator.step), *filter(None, [profile.simulator.larger])]
        for n_envs, step in sizes:
            yield f"{'simulator alone':<26}{n_envs / step:>10,.0f}  {short_time(step)} for all {n_envs:,}"
    if profile.pace.inference:
        rate = profile.n_envs / profile.pace.inference
        yield f"{'inference alone':<26}{rate:>10,.0f}  {short_time(profile.pace.inference)} for all {profile.n_envs}"
    if profile.collecting:
        yield f"{'collecting alone':<26}{profile.steps / profile.collecting:>10,.0f}"
    learning = f"{profile.steps / profile.pace.learning:>10,.0f}"
    if profile.is_single_graph:
        yield f"{ON_DEVICE:<26}{learning}  {short_time(profile.pace.learning)} each, stepping and learning"
    else:
        yield f"{'learning alone':<26}{learning}  {short_time(profile.pace.learning / profile.updates)} per update"
    for threads, seconds in profile.learning_by_threads:
        yield f"{f'learning, {threads} thread' + 's' * (threads > 1):<26}{profile.steps / seconds:>10,.0f}"
    if profile.other_device is not None:
        where = "the CPU" if profile.on_gpu else "the GPU"
        yield f"{f'learning on {where}':<26}{profile.steps / profile.other_device.learning:>10,.0f}"
    if facts.to_device is not None and facts.from_device is not None:
        yield f"copies: {facts.to_device / 1e9:.1f} GB/s to the GPU, {facts.from_device / 1e9:.1f} GB/s back"
    if facts.steps is not None:
        steps = facts.steps
        yield (
            f"one environment step: {short_time(steps.median)} (median), {short_time(steps.p95)} (95th percentile), "
            f"{percent(profile.on_core)} of it on a core"
        )
    memory = f"host memory {percent(facts.readings.host_memory)}"
    if profile.on_gpu:
        memory += f", GPU memory {percent(facts.readings.gpu_memory)}"
    used, others = facts.readings.cores_used, facts.readings.others_cores
    yield f"in use: {_cores(used)} of {profile.cores} cores (other programs: {_cores(others)}), {memory}"


def _cores(cores: float | None) -> str:
    return MISSING if cores is None else f"{cores:.1f}"


def _warnings(facts: Facts) -> Iterator[str]:
    """Yield warnings about rough predictions: other programs on the cores, or parts that do not add up to the whole."""
    others = facts.readings.others_cores
    if others is not None and others > _CROWDED * facts.profile.cores:
        yield "note: other programs use these cores, which distorts the measurements; repeat without them."
    if facts.predictions_are_rough:
        yield (
            f"note: the parts of an iteration add up to {short_time(facts.modelled_seconds)}, but in training it took "
            f"{short_time(facts.seconds)}; predictions are rough."
        )


def _shortened(diagnosis: Diagnosis) -> str:
    wanted = diagnosis.facts.profile.n_steps
    return "" if diagnosis.n_steps == wanted else f" of {diagnosis.n_steps} steps instead of {wanted} to save time"


def _advice(advice: Sequence[Advice], is_rough: bool) -> Iterator[str]:
    if not advice:
        yield "  none"
    for one in advice:
        gain = MISSING if one.speedup is None else _gain(one.speedup, one.at_most, is_rough)
        yield f"  {gain:>9}  {f'{one.flags}  ' if one.flags else ''}{one.text}"


def _gain(speedup: float, at_most: bool, is_rough: bool) -> str:
    if is_rough:
        return f"{'<' if at_most else 'about'} {speedup:{'.0f' if speedup >= 2 else '.1f'}} ×"
    return f"{'< ' if at_most else ''}{speedup:.2f} ×"


def result(diagnosis: Diagnosis) -> dict[str, Any]:
    """Return the diagnosis as one JSON object."""
    facts, verdict = diagnosis.facts, diagnosis.verdict
    return {
        "cause": verdict.cause,
        "verdict": verdict.sentence,
        "basis": verdict.basis,
        "findings": [asdict(finding) for finding in verdict.findings],
        "table": asdict(facts.table),
        "engine_changes": [asdict(one) for one in verdict.engine],
        "recipe_changes": [asdict(one) | {"remark": recipe_remark(facts)} for one in verdict.recipe],
        "steps_per_second": facts.steps_per_second,
        "seconds_per_iteration": facts.seconds,
        "modelled_seconds_per_iteration": facts.modelled_seconds,
        "predictions_are_rough": facts.predictions_are_rough,
        "iterations": diagnosis.iterations,
        "n_steps_tried": diagnosis.n_steps,
        "profile": asdict(facts.profile),
        "shares": facts.shares,
        "step": asdict(facts.steps) if facts.steps else None,
        "readings": asdict(facts.readings),
        "requests": facts.request_counts,
        "copies": {"to_device": facts.to_device, "from_device": facts.from_device, "sent_bytes": facts.sent_bytes},
        "replay_on_host": facts.replay_on_host,
        "learning_seconds": {
            "replay_buffer_on_gpu": facts.learning_with_replay_on_gpu,
            "in_tf32": facts.learning_in_tf32,
        },
        "slow_fallbacks": list(facts.slow_fallbacks),
        "config": facts.config.flat(),
    }
