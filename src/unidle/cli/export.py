"""`unidle export`: export the policy of a run as ONNX."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from unidle.cli.flags import Result, parse
from unidle.cli.trust import is_trusted
from unidle.errors import UsageError


@dataclass(frozen=True)
class _ExportFlags:
    """Export the best policy of a run, including observation normalisation, for use without unidle."""

    run: Annotated[Path, tyro.conf.Positional]
    """Run folder, such as runs/my-run."""
    onnx: bool = False
    """Write policy.onnx into the run folder (extra `onnx`)."""
    trust: bool = False
    """Trust a run that you did not create: import the code named in its config."""
    json: bool = False
    """Print the result as a JSON object."""


def export_command(argv: list[str]) -> Result:
    """`unidle export`"""
    flags = parse(_ExportFlags, argv, "export")
    if not flags.onnx:
        raise UsageError("No export format given; add --onnx.")

    from unidle.api import load
    from unidle.engine.export import export_onnx
    from unidle.writing import remove_link

    run = load(flags.run, trust=is_trusted(flags.run, ["network"], flags.trust))
    agent, path = run.agent, flags.run / "policy.onnx"
    try:
        export_onnx(agent, remove_link(path))
    except OSError as error:
        raise UsageError(f"{path} cannot be written ({error.strerror}); make the folder writable.") from None
    if flags.json:
        return {"path": str(path)}
    print(path)
    return None
