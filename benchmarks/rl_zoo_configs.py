"""Reads every entry of rl-zoo's ppo, ppo_lstm, sac, td3 and dqn files: usable, or refused with the reason.

    python benchmarks/rl_zoo_configs.py

Downloads the rl_zoo3 package from the package index into a temporary folder. Needs neither a GPU nor the environments.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import warnings
import zipfile
from pathlib import Path
from typing import Any

import yaml
from machine import provenance, save

from unidle.config.foreign.rl_zoo import PlainLoader
from unidle.config.resolve import resolve_layers
from unidle.config.settings import PPORecipe
from unidle.config.validate import validated
from unidle.errors import UsageError

ALGORITHMS = ("ppo", "ppo_lstm", "sac", "td3", "dqn")
OTHERS = ("a2c", "ddpg", "trpo", "tqc", "qrdqn", "ars", "her", "crossq")  # refused as a whole


def download(folder: Path) -> tuple[str, Path]:
    """The package's version, and the folder of its config files."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "rl_zoo3"]
    subprocess.run(command, cwd=folder, check=True)
    (wheel,) = folder.glob("rl_zoo3-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return wheel.name.split("-")[1], folder / "rl_zoo3" / "hyperparams"


def read(path: Path, entry: str, algo: str | None = None) -> dict[str, Any]:
    """What unidle makes of an entry: the algorithm and messages, or the reason why it is refused."""
    env = "ALE/Pong-v5" if entry == "atari" else entry
    try:
        layers = resolve_layers(None, path, has_gpu=False, env=env, algo=algo)
        config = validated(layers.with_flags({"env": env}), layers.preset_batch_size)
    except UsageError as error:
        return {"refused": str(error).replace(str(path), path.name)}
    recipe = config.recipe
    is_lstm = isinstance(recipe, PPORecipe) and recipe.recurrent == "lstm"
    return {
        "algo": recipe.algo + "_lstm" * is_lstm,
        "notes": [note.replace(str(path), path.name) for note in layers.notes],
    }


def main() -> None:
    table: dict[str, dict[str, dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        version, files = download(Path(folder))
        for name in ALGORITHMS:
            path = files / f"{name}.yml"
            entries = yaml.load(path.read_text(), PlainLoader)
            table[name] = {entry: read(path, entry) for entry in entries if entry != "default"}
        others = {}
        for name in OTHERS:
            path = files / f"{name}.yml"
            if path.exists():
                others[name] = read(path, next(iter(yaml.load(path.read_text(), PlainLoader))))
    for name, entries in table.items():
        wrong = [entry for entry, result in entries.items() if result.get("algo", name) != name]
        usable = sum("refused" not in result for result in entries.values())
        print(f"{name}: {usable} of {len(entries)} usable, {len(wrong)} would train another algorithm")
        for entry, result in entries.items():
            if "refused" in result:
                print(f"  {entry:<34} {result['refused']}")
    for name, result in others.items():
        print(f"{name}: {result.get('refused', 'NOT REFUSED')}")
    save("rl_zoo_configs", {"rl_zoo3": version, "machine": provenance(), "files": table, "others": others})


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
