"""HalfCheetah on a GPU as `unidle train` delivers it: from delivered.json, for the presets that are measured there."""

from __future__ import annotations

from typing import Any

from figure_values import number, percent, results, times

FULL = "`unidle train` with evaluation, checkpoints and TensorBoard"


def delivered(preset: str) -> Any:
    """The preset's row of delivered.json if all of its sides are measured, otherwise None."""
    try:
        row = results("delivered").get(preset)
    except FileNotFoundError:
        return None
    needed = {"delivered", "loop", "sb3 cuda", "sb3 cpu"} | ({"off"} if preset == "beast" else set())
    return row if row and row["runs"].keys() >= needed else None


def compared_with_sb3(row: Any, name: str, ours: str) -> list[str]:
    """A row of a table: medians, the lowest and highest of several runs, and NVML's utilisation."""

    def cell(side: str) -> str:
        rates = [run["steps_per_second"] for run in row["runs"][side]]
        spread = f"{number(min(rates))} to {number(max(rates))}; " if len(rates) > 1 else ""
        device = " on the CPU" if side == "sb3 cpu" else ""
        median = row["medians"][side]
        return f"{number(median['steps_per_second'])}{device} ({spread}NVML {percent(median['gpu_percent'] / 100)})"

    return [name, cell(ours), cell(row["sb3"]), times(row["times_sb3"][ours])]


def share_of_loop(measured: dict[str, Any]) -> str:
    """How much of its training loop each preset delivers, and the start-up of both libraries."""
    shares = ", ".join(f"{number(row['ratio'], 2)} (`{preset}`)" for preset, row in measured.items())
    starts = []
    for preset, row in measured.items():
        ours, theirs = (number(row["medians"][side]["start_up"], 1) for side in ("delivered", row["sb3"]))
        starts.append(f"{ours} against {theirs} s (`{preset}`)")
    return (
        f"{FULL} reaches {shares} of the speed of the training loop alone; Stable-Baselines3 evaluates after as many "
        f"steps. The start-up, up to the end of the first iteration, is not counted: {', '.join(starts)}."
    )
