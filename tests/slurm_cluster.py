"""A real Slurm of three nodes on this machine: daemons of its own in a temporary folder, on free ports."""

from __future__ import annotations

import getpass
import os
import re
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

NODES = ("n1", "n2", "n3")
_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue", "scancel")
_CONF = """
ClusterName=unidle
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1,bf_interval=1
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=20
ReturnToService=2
GresTypes=gpu
{nodes}
PartitionName=gpu Nodes=n1,n2,n3 Default=YES MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=urgent Nodes=n1,n2,n3 MaxTime=INFINITE State=UP PriorityTier=2
"""
_NODE = "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=16 RealMemory=64000 Gres=gpu:a100:2"


def why_not() -> str | None:
    """Why this machine cannot run Slurm; None if it can."""
    if os.getuid() != 0:
        return "needs root, to start Slurm's daemons"
    missing = [name for name in _PROGRAMS if shutil.which(name, path=_path()) is None]
    return f"needs Slurm and MUNGE ({', '.join(missing)})" if missing else None


def _path() -> str:
    return f"{os.environ['PATH']}:/usr/sbin:/sbin"


class SlurmCluster:
    """munged, slurmctld and three slurmd, until `stop`."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="unidle-slurm-"))  # the path of a socket must be short
        outside = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH"))}
        self.environment = {**outside, "PATH": _path(), "SLURM_CONF": str(self.folder / "slurm.conf")}
        self._daemons: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start the daemons, and wait until all nodes are idle."""
        folder = self.folder
        folder.chmod(0o755)
        munge = folder / "munge"
        for path in (munge, folder / "state"):
            path.mkdir(mode=0o755)
        key = munge / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        ports = _free_ports(1 + len(NODES))
        host = socket.gethostname().split(".")[0]
        nodes = [_NODE.format(name=name, host=host, port=port) for name, port in zip(NODES, ports[1:])]
        text = _CONF.format(folder=folder, user=getpass.getuser(), ports=ports, nodes="\n".join(nodes))
        (folder / "slurm.conf").write_text(text)
        (folder / "gres.conf").write_text("Name=gpu Type=a100 File=/dev/null\nName=gpu Type=a100 File=/dev/zero\n")
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        self._daemon(
            *("munged", "--foreground", "--force", f"--key-file={key}", f"--socket={munge}/socket"),
            *(f"--pid-file={munge}/pid", f"--seed-file={munge}/seed", f"--log-file={munge}/log"),
        )
        wait_for(lambda: (munge / "socket").exists(), 10, self.logs)
        self._daemon("slurmctld", "-D")
        for name in NODES:
            self._daemon("slurmd", "-D", "-N", name)
        wait_for(lambda: self.run("scontrol", "show", "nodes", "-o").count(" State=IDLE ") == len(NODES), 20, self.logs)

    def _daemon(self, *words: str) -> None:
        with (self.folder / f"{'-'.join(words[:1] + words[3:4])[:40].replace('/', '_')}.log").open("wb") as log:
            daemon = subprocess.Popen(words, env=self.environment, stdout=log, stderr=log, cwd=self.folder)
        self._daemons.append(daemon)

    def logs(self) -> str:
        """What the daemons have printed, for a test that fails."""
        return "\n".join(f"== {path.name}\n{path.read_text()[-2000:]}" for path in self.folder.glob("*.log"))

    def run(self, *words: str) -> str:
        """What a command prints; empty if it fails."""
        return subprocess.run(
            words, env=self.environment, capture_output=True, text=True, timeout=30, check=False
        ).stdout

    def states(self, job: str) -> list[str]:
        """The state of a job, such as RUNNING; of an array, those of its tasks."""
        return re.findall(r"JobState=(\S+)", self.run("scontrol", "show", "job", "-o", job))

    def stop(self) -> None:
        """Cancel all jobs, wait for their ends, and stop the daemons."""
        self.run("scancel", "--user", getpass.getuser())
        deadline = time.monotonic() + 10
        while self.run("squeue", "-h").strip() and time.monotonic() < deadline:
            time.sleep(0.1)
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def wait_for(happened: Callable[[], object], seconds: float, explain: Callable[[], str] = str) -> None:
    """Wait until something has happened."""
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, explain()
        time.sleep(0.1)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
