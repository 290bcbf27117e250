"""Graphs that are split where ranks reduce."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from unidle.engine.cuda_graphs import Capture
from unidle.engine.split_graphs import Seam, SplitGraphs


class RecordedGraph:
    """In place of a CUDA graph: the calls that it gets, in one list for all graphs."""

    def __init__(self, calls: list[str]) -> None:
        self._calls, self._number = calls, sum(call.startswith("begin") for call in calls)

    def register_generator_state(self, generator: torch.Generator) -> None:
        self._calls.append(f"generator {self._number}")

    def capture_begin(self, **arguments: Any) -> None:
        self._calls.append(f"begin {self._number} in {arguments['pool']}")

    def capture_end(self) -> None:
        self._calls.append(f"end {self._number}")

    def replay(self) -> None:
        self._calls.append(f"replay {self._number}")


def test_function_is_captured_in_parts_and_reductions_run_between_their_replays() -> None:
    calls: list[str] = []
    seam = Seam(lambda gradient: calls.append(f"reduce {int(gradient)}"))
    graphs = SplitGraphs((1, 2), [torch.Generator()], lambda: RecordedGraph(calls))  # type: ignore[arg-type,return-value]
    with graphs.capturing(seam):
        seam(torch.tensor(7))
        seam(torch.tensor(8))
    captured = [f"{what} {number}" for number in range(3) for what in ("generator", "begin", "end")]
    assert [call.replace(" in (1, 2)", "") for call in calls] == captured  # nothing was reduced
    calls.clear()
    graphs.replay()
    assert calls == ["replay 0", "reduce 7", "replay 1", "reduce 8", "replay 2"]


def test_seam_reduces_outside_captures_but_not_in_warm_ups() -> None:
    seen: list[int] = []
    seam = Seam(lambda gradient: seen.append(int(gradient)))
    seam(torch.tensor(1))
    with seam.warming_up():
        assert not seam.is_used
        seam(torch.tensor(2))
    assert seam.is_used
    seam(torch.tensor(3))
    assert seen == [1, 3]


def test_failed_capture_is_ended_and_seam_reduces_again() -> None:
    calls: list[str] = []
    seam = Seam(lambda gradient: calls.append("reduce"))
    graphs = SplitGraphs((1, 2), [], lambda: RecordedGraph(calls))  # type: ignore[arg-type,return-value]
    with pytest.raises(ValueError, match="broken"), graphs.capturing(seam):
        raise ValueError("broken")
    seam(torch.tensor(1))
    assert calls == ["begin 0 in (1, 2)", "end 0", "reduce"]


def test_on_cpu_nothing_is_split() -> None:
    def reduce(gradient: torch.Tensor) -> None:
        gradient.zero_()

    assert Capture(torch.device("cpu"), print).split_at(reduce) is reduce


@pytest.mark.gpu
def test_split_graphs_give_the_results_of_eager_execution() -> None:
    """Two steps of gradient descent with a reduction that halves, and noise from a registered generator."""
    for one, other in zip(_three_runs(graphs=False), _three_runs(graphs=True)):
        assert torch.equal(one, other)


def _three_runs(*, graphs: bool) -> list[torch.Tensor]:
    device = torch.device("cuda")
    messages: list[str] = []
    capture = Capture(device, messages.append, graphs=graphs)
    reduce = capture.split_at(lambda gradient: gradient.mul_(0.5))
    weights, total = torch.ones(4, device=device), torch.zeros(4, device=device)
    generator = torch.Generator(device).manual_seed(5)

    def step() -> None:
        for _ in range(2):
            gradient = weights * torch.rand(4, device=device, generator=generator)
            reduce(gradient)
            weights.sub_(0.1 * gradient)
            total.add_(gradient)

    run = capture("steps", step, [weights, total], generators=(generator,))
    for _ in range(3):
        run()
    assert not messages
    return [weights, total]
