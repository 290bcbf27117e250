"""A saved model: a zip of JSON and tensors, which is read without unpickling code."""

from __future__ import annotations

import io
import json
import zipfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import torch

from unidle.errors import UsageError
from unidle.version import __version__
from unidle.writing import replacing

_SETTINGS, _STATE = "unidle.json", "state.pt"

File = str | Path | IO[bytes]


@dataclass(frozen=True)
class Saved:
    """What describes a saved model, besides its state."""

    algo: str
    settings: dict[str, Any]  # the recipe and the seed, flat
    needs: list[str]  # arguments that are Python objects, which `load` needs again
    others: dict[str, Any] = field(default_factory=dict)  # arguments that are no settings
    version: str = __version__


def write_zip(file: File, saved: Saved, state: dict[str, Any]) -> None:
    """Write a model; a path without an ending gets .zip."""
    tensors, archive = io.BytesIO(), io.BytesIO()
    torch.save(state, tensors)
    with zipfile.ZipFile(archive, "w") as zipped:
        zipped.writestr(_SETTINGS, json.dumps(asdict(saved), indent=1))
        zipped.writestr(_STATE, tensors.getvalue())
    if not isinstance(file, str | Path):
        file.write(archive.getvalue())
        return
    path = with_ending(file)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as target:
        target.write(archive.getvalue())


def with_ending(path: str | Path) -> Path:
    """The path, with .zip if it has no ending."""
    path = Path(path)
    return path if path.suffix else path.with_name(f"{path.name}.zip")


def open_zip(file: File) -> zipfile.ZipFile:
    """A saved model's archive; UsageError if it is none."""
    source: Any = file
    if isinstance(file, str | Path):
        source = Path(file)
        if not source.is_file():
            source = with_ending(source)
        if not source.is_file():
            raise UsageError(f"There is no model {file}; check the path.")
    try:
        return zipfile.ZipFile(source)
    except zipfile.BadZipFile:
        raise UsageError(f"{file} wasn't a zip-file, or is damaged; use one that `save` wrote.") from None


def is_own(archive: zipfile.ZipFile) -> bool:
    """Whether unidle wrote it."""
    return _SETTINGS in archive.namelist()


def read_zip(archive: zipfile.ZipFile, shown: object) -> tuple[Saved, dict[str, Any]]:
    """A model that `write_zip` wrote."""
    try:
        given = json.loads(archive.read(_SETTINGS))
        return Saved(**given), read_tensors(archive, _STATE)
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(
            f"{shown} is damaged, or was written by a newer unidle ({type(error).__name__}: {error}); use another one."
        ) from None


def read_tensors(archive: zipfile.ZipFile, name: str) -> Any:
    """The tensors and plain values in one file of the archive; code in it is refused, not run."""
    return torch.load(io.BytesIO(archive.read(name)), map_location="cpu", weights_only=True)
