"""A real batch system of one node, for as long as a block runs: Debian's SLURM, in a folder of its own (root)."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
CONFIG = """\
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/socket
CryptoType=crypto/munge
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
NodeName={host} NodeAddr=127.0.0.1 CPUs={cores} State=UNKNOWN
PartitionName=all Nodes={host} Default=YES State=UP
"""


def missing() -> list[str]:
    """What a batch system needs and this machine lacks."""
    path = f"{os.environ['PATH']}:/usr/sbin"
    return [p for p in PROGRAMS if shutil.which(p, path=path) is None] + ["root"] * (os.geteuid() != 0)


@contextlib.contextmanager
def one_node(folder: Path) -> Iterator[dict[str, str]]:
    """Yields the environment in which `sbatch` finds the batch system."""
    for name in ("state", "spool"):
        (folder / name).mkdir()
    key = folder / "key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    config = folder / "slurm.conf"
    said = {"host": socket.gethostname().partition(".")[0], "cores": len(os.sched_getaffinity(0))}
    config.write_text(CONFIG.format(folder=folder, ports=free_ports(2), **said))
    environment = {**os.environ, "SLURM_CONF": str(config), "PATH": f"{os.environ['PATH']}:/usr/sbin"}
    munge = [f"--{name}={folder / value}" for name, value in MUNGE.items()]
    try:
        for command in (["munged", "--force", *munge], ["slurmctld", "-f", config], ["slurmd", "-f", config]):
            subprocess.run(list(map(str, command)), env=environment, check=True, capture_output=True)
        deadline = time.monotonic() + 60
        while "idle" not in told(["sinfo", "--noheader"], environment):
            assert time.monotonic() < deadline, (folder / "slurmctld.log").read_text()
            time.sleep(0.1)
        yield environment
    finally:
        for name in ("slurmd.pid", "slurmctld.pid", "pid"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                os.kill(int((folder / name).read_text()), signal.SIGKILL)


MUNGE = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}


def told(command: Sequence[str], environment: dict[str, str]) -> str:
    """What a command says."""
    return subprocess.run(
        list(command), env=environment, capture_output=True, text=True, check=False, timeout=300
    ).stdout


def free_ports(count: int) -> list[int]:
    """Ports of this machine that nobody listens on."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
