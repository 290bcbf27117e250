"""`unidle train --gpus` and `--ranks`: one job on several processes."""

from __future__ import annotations

import sys

from unidle.cli.flags import peek
from unidle.cli.results import WithCode
from unidle.config import Config
from unidle.distributed.place import current_place
from unidle.errors import UsageError


def ranks_to_start(gpus: int | None, ranks: int | None) -> int | None:
    """How many ranks to start; None if this process is to train, alone or as one of the ranks of a job."""
    if gpus is not None and ranks is not None:
        raise UsageError("--gpus and --ranks both say how many ranks to start; remove one of them.")
    flag, size = ("--gpus", gpus) if gpus is not None else ("--ranks", ranks)
    if size is None:
        return None
    if size < 1:
        raise UsageError(f"{flag} is {size}; it must be at least 1.")
    place = current_place()
    if place is not None:
        if place.size != size:
            raise UsageError(f"{flag} is {size}, but torchrun has started {place.size} ranks; remove {flag}.")
        return None
    if gpus is not None:
        _require_gpus(gpus)
    return size if size > 1 else None


def _require_gpus(gpus: int) -> None:
    import torch  # takes seconds, so only when needed

    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not found:
        raise UsageError(
            f"--gpus {gpus}: torch finds no CUDA GPU on this machine; --ranks {gpus} trains on the CPU in {gpus} "
            "processes."
        )
    if gpus > found:
        have = "1 GPU" if found == 1 else f"{found} GPUs"
        raise UsageError(f"--gpus {gpus}: this machine has {have}; use --gpus {found}.")


def require_single_run(what: str | None) -> None:
    """UsageError if the job is not a single run."""
    if what is not None:
        raise UsageError(f"{what} does not train on several ranks; remove --gpus and --ranks.")


def with_n_envs_of_job(argv: list[str]) -> list[str]:
    """`argv` with --n-envs-per-gpu as the --n-envs of the whole job."""
    each = peek(argv, "--n-envs-per-gpu")
    if each is None:
        return argv
    if peek(argv, "--n-envs") is not None:
        raise UsageError("--n-envs is for all ranks together, and --n-envs-per-gpu for each; remove one of them.")
    place = current_place()
    ranks = str(place.size) if place else peek(argv, "--gpus") or peek(argv, "--ranks")
    if not ranks or not ranks.isdecimal() or not each.isdecimal():
        raise UsageError("--n-envs-per-gpu needs the number of ranks; add --gpus, or start the job with torchrun.")
    return [*argv, "--n-envs", str(int(each) * int(ranks))]


def start_ranks(size: int, argv: list[str], config: Config) -> WithCode:
    """Train as `size` ranks, each of which reads the same flags."""
    from unidle.distributed.launch import launch
    from unidle.distributed.share import not_pinned, share_of

    share_of(config.recipe, size)  # here, so that a recipe that cannot be shared is refused once
    not_pinned(config.engine)
    command = [sys.executable, "-m", "unidle", "train", *argv]
    return WithCode(None, launch(command, size, lambda text: print(f"unidle: {text}", file=sys.stderr)))
