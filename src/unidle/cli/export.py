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
    """Export the best policy of a run as ONNX, including observation normalisation, for use without unidle.

    Needs the extra `onnx`.
    """

    run: Annotated[Path, tyro.conf.Positional]
    """Run folder, such as runs/my-run."""
    out: Path | None = None
    """Output file; by default policy.onnx in the run folder."""
    trust: bool = False
    """Trust a run that you did not create: import the code named in its config."""
    json: bool = False
    """Print the result as a JSON object."""


def export_command(argv: list[str]) -> Result:
    """`unidle export`"""
    # ONNX is the only format; --onnx used to be required.
    flags = parse(_ExportFlags, [word for word in argv if word != "--onnx"], "export")

    from unidle.api import load
    from unidle.engine.export import export_onnx
    from unidle.writing import remove_link

    run = load(flags.run, trust=is_trusted(flags.run, ["network"], flags.trust))
    agent, path = run.agent, flags.out
    try:
        if path is None:
            path = remove_link(flags.run / "policy.onnx")
        export_onnx(agent, path)
    except OSError as error:
        fix = "choose another --out" if flags.out else "make the folder writable"
        raise UsageError(f"{path} cannot be written ({error.strerror}); {fix}.") from None
    if flags.json:
        return {"path": str(path)}
    print(path)
    return None
