"""Disks that fail: full, read-only or too small, in a mount namespace of their own.

`enter_namespace` needs root, or a kernel that lets users create namespaces. File systems that are mounted afterwards
are seen by this process and its children only, and disappear with them.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

SHARED = ("4 KB /dev/shm", "full /dev/shm", "read-only /dev/shm", "full TMPDIR")  # of one process; no reason to fail
RUN_FOLDER = (
    "too small",  # from the start: writes fail at some point
    "full",  # from some moment on
    "full for a moment",
    "read-only",  # from some moment on; files that are open can still be written
    "read-only for a moment",
    "read-only from the start",
)
FILE_SIZE = "file size limit"  # needs no mount
KINDS = (*RUN_FOLDER, FILE_SIZE, *SHARED)

_INSIDE = "UNIDLE_FAULT_TRIAL_NAMESPACE"
_SIZE = 8 << 20  # of a disk that is sound at first
_MAX_FILE_BYTES = 60_000


def enter_namespace() -> bool:
    """Start this program again in its own mount namespace; whether it can mount now."""
    if _INSIDE in os.environ:
        return True
    unshare = shutil.which("unshare")
    if unshare is None:
        return False
    command = [unshare, "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"])]
    works = subprocess.run([*command, "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True).returncode == 0
    if works:
        os.environ[_INSIDE] = "1"
        os.execv(unshare, [*command, sys.executable, *sys.argv])
    return False


@dataclass
class Disk:
    """The disk of one run, mounted at `path`."""

    kind: str
    path: Path
    rng: Random
    _undo: list[Callable[[], object]] = field(default_factory=list)

    def prepare(self) -> None:
        """Before the run starts."""
        if self.kind in RUN_FOLDER:
            size = self.rng.randrange(20_000, 500_000) if self.kind == "too small" else _SIZE
            self.path.mkdir()
            _mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs", self.path)
        if self.kind == "read-only from the start":
            self.strike(0)

    def wrap(self, command: list[str]) -> list[str]:
        """The command that starts the run."""
        if self.kind not in SHARED:
            return command
        target, option = "/dev/shm", {"4 KB /dev/shm": "size=4k", "read-only /dev/shm": "ro"}.get(self.kind, "size=64k")
        setting = ""
        if self.kind == "full TMPDIR":
            target, setting = "/mnt", "export TMPDIR=/mnt;"
        fill = f"cat /dev/zero >{target}/x 2>&-;" if self.kind.startswith("full") else ""
        script = f'mount -t tmpfs -o {option} tmpfs {target} && {{ {fill} {setting} exec "$@"; }}'
        return ["unshare", "--mount", "sh", "-c", script, "sh", *command]

    def strike(self, pid: int) -> None:
        """Make the disk fail."""
        if self.kind in ("full", "full for a moment"):
            filler = self.path / "filler"
            self._undo.append(lambda: filler.unlink(missing_ok=True))
            _fill(filler)
        elif self.kind.startswith("read-only") and self.kind not in SHARED:
            _mount("--bind", self.path, self.path)  # over the first mount, which has files open for writing
            self._undo.append(lambda: subprocess.run(["umount", "--lazy", str(self.path)]))
            _repeat(lambda: _mount("-o", "remount,bind,ro", self.path))
        elif self.kind == FILE_SIZE:
            limit = self.rng.randrange(_MAX_FILE_BYTES)
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (limit, limit))
        if self.kind.endswith("for a moment"):
            time.sleep(self.rng.uniform(0, 0.3))
            self.repair()

    def repair(self) -> None:
        """Make the disk work again."""
        while self._undo:
            self._undo.pop()()
        if self.kind == "too small":
            _mount("-o", f"remount,size={_SIZE}", self.path)

    @contextlib.contextmanager
    def mounted(self) -> Iterator[Disk]:
        """`prepare`, and unmount at the end."""
        self.prepare()
        try:
            yield self
        finally:
            self.repair()
            if self.kind in RUN_FOLDER:
                subprocess.run(["umount", "--lazy", str(self.path)], check=True)


def _mount(*words: object) -> None:
    subprocess.run(["mount", *map(str, words)], check=True)


def _repeat(mount: Callable[[], None]) -> None:
    """Call `mount` until it succeeds, for a second: a mount is busy while a file on it is open for writing."""
    until = time.monotonic() + 1.0
    while True:
        try:
            mount()
            return
        except subprocess.CalledProcessError:
            if time.monotonic() > until:
                raise
            time.sleep(0.01)


def _fill(path: Path) -> None:
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
