"""`unidle presets`: list the presets, and which of them fit this machine."""

from __future__ import annotations

from dataclasses import dataclass

from unidle.cli.flags import TABLE_WIDTH, Result, parse
from unidle.config.machine import available_cores, available_memory
from unidle.config.presets import load_preset, preset_names


@dataclass(frozen=True)
class _PresetsFlags:
    """List the presets, what each needs, and which of them fit this machine."""

    json: bool = False
    """Print the result as a JSON object."""


def presets_command(argv: list[str]) -> Result:
    """`unidle presets`"""
    flags = parse(_PresetsFlags, argv, "presets")
    cores, memory = available_cores(), available_memory()
    rows = []
    for name in preset_names():
        preset = load_preset(name)
        recipe = preset.recipe
        rows.append(
            {
                "preset": name,
                "n_envs": recipe.n_envs,
                "n_steps": recipe.n_steps,
                "total_batch": recipe.total_batch,
                "batch_size": recipe.batch_size,
                "n_epochs": vars(recipe).get("n_epochs"),
                "network": list(recipe.net_arch),
                "cores": preset.cores,
                "memory_gb": round(preset.memory() / 2**30, 1),
                "fits": preset.fits(cores, memory),
                "instead": preset.smaller(cores, memory),
                "measured": preset.measured,
                "description": preset.description,
            }
        )
    if flags.json:
        return {"cores": cores, "memory_gb": round(memory / 2**30, 1), "presets": rows}
    from rich.console import Console

    from unidle.report.terminal.presets import print_presets

    console = Console()
    width = console.width if console.is_terminal else max(console.width, TABLE_WIDTH)
    print_presets(Console(width=width), rows, cores, memory)
    return None
