"""The sink for metrics: `metrics.jsonl` always, TensorBoard and W&B when asked."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from pathlib import Path
from typing import Any

from unidle.errors import UsageError, WriteError


class Journal:
    """Appends one record per iteration (or evaluation) and passes it on to TensorBoard and W&B."""

    def __init__(
        self,
        folder: Path,
        *,
        step: int = 0,
        tensorboard: bool = True,
        wandb: bool = False,
        name: str = "",
        config: dict[str, Any] | None = None,
    ) -> None:
        """Open a run folder's journal at `step`: what was written past it is dropped, for it will be written anew."""
        self._file = reopen(folder / "metrics.jsonl", step)
        self._latest = step
        self._board: Any = None
        self._wandb: Any = None
        if tensorboard:
            from tensorboardX import SummaryWriter

            # TensorBoard hides what earlier files hold from purge_step on. Files are named by the second they begin in:
            # the step in the name keeps a run resumed within that second from writing over its first file.
            self._board = SummaryWriter(
                str(folder / "tensorboard"), purge_step=step + 1, filename_suffix=f".{step:012d}", flush_secs=10
            )
        if wandb:
            self._wandb = _wandb_run(folder, name, config or {})

    def write(self, record: dict[str, Any]) -> None:
        """Append `record`; it must hold `step`, and numbers under names such as `train/loss`."""
        try:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
        except OSError as error:
            raise WriteError(f"{self._file.name} cannot be written ({error.strerror}); make room there.") from error
        if record["kind"] == "fault":
            return  # an event to read about, not a curve
        numbers = {k: v for k, v in record.items() if isinstance(v, (int, float)) and k not in ("step", "kind")}
        if self._board is not None:
            from tensorboardX.proto.summary_pb2 import Summary

            # All of them as one event: an event for each, as add_scalar writes, takes eight times as long.
            values = [Summary.Value(tag=key, simple_value=value) for key, value in numbers.items()]
            self._board.file_writer.add_summary(Summary(value=values), record["step"])
        if self._wandb is not None:
            # An evaluation beside training is done when later steps are logged already, and W&B never goes back.
            self._latest = max(self._latest, record["step"])
            self._wandb.log({**numbers, "at_step": record["step"]}, step=self._latest)

    def close(self) -> None:
        """Flush and close every sink."""
        with contextlib.suppress(OSError):  # what could not be written was told of then
            self._file.close()
        if self._board is not None:
            self._board.close()
        if self._wandb is not None:
            self._wandb.finish()


def reopen(path: Path, step: int) -> Any:
    """Open for appending after dropping records past `step` and a line cut short by a kill."""
    if path.exists():
        kept = [r for r in read_records(path) if r["step"] <= step] if step else []
        fresh = path.with_suffix(".tmp")
        fresh.write_text("".join(json.dumps(r) + "\n" for r in kept))
        os.replace(fresh, path)
    return path.open("a", encoding="utf-8")


def read_records(path: Path) -> list[dict[str, Any]]:
    """All whole records of a metrics file, oldest first."""
    records = []
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                records.append(json.loads(line))
            except json.JSONDecodeError:
                continue  # the last line of a run that was killed while writing it
    return records


def how_good(evaluation: dict[str, Any]) -> tuple[float, float]:
    """What to compare the records of two evaluations by: success first, if it is told, then mean return.

    NaN compares with nothing, and would stay the best for ever: it counts as the worst.
    """
    success, mean = evaluation.get("eval/success"), evaluation["eval/return_mean"]
    return -math.inf if success is None else success, -math.inf if math.isnan(mean) else mean


def _wandb_run(folder: Path, name: str, config: dict[str, Any]) -> Any:
    try:
        import wandb
    except ImportError:
        raise UsageError("--wandb needs the package wandb; run: pip install 'unidle[wandb]'.") from None
    # The id says which folder this is, so that a resumed run goes on in W&B too, and no other run of that name does.
    place = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:8]
    try:
        return wandb.init(
            project="unidle", name=name, id=f"{name}-{place}", config=config, dir=str(folder), resume="allow"
        )
    except wandb.errors.UsageError:
        raise UsageError("W&B does not know you here; run `wandb login`, or set WANDB_MODE=offline.") from None
