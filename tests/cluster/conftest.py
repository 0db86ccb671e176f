"""Set up a real SLURM cluster with two nodes, two hosts in network namespaces, and an S3 server, all on one machine.

SLURM and the hosts need root.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from machines import Host, ask, ip, need_root
from running import free_port, wait_until
from s3_server import S3Server, find_weed

from paceline.core.watch import die_with_parent

DAEMONS = ("munged", "slurmctld", "slurmd", "sbatch")
CONFIGURATION = """
ClusterName=tiny
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldPort={port}
SrunPortRange={srun_ports}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdTimeout=30
KillWait=5
JobRequeue=1
SlurmdParameters=config_overrides
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={n1} CPUs=2 RealMemory=4000 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={n2} CPUs=2 RealMemory=4000 State=UNKNOWN
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests in this folder, so that they run only on request."""
    for item in items:
        if "cluster" in Path(item.fspath).parent.name:
            item.add_marker(pytest.mark.cluster)


@pytest.fixture(scope="session")
def slurm() -> Iterator[None]:
    """Run SLURM's daemons while the tests run."""
    need_root()
    missing = [name for name in DAEMONS if not shutil.which(name)]
    if missing:
        pytest.skip(f"SLURM is missing: {', '.join(missing)} (Debian: slurmctld slurmd slurm-client munge)")
    folder = (
        Path("/tmp") / f"paceline-slurm-{os.getpid()}"
    )  # kept short, because a socket path may have at most 107 characters
    for name in ("state", "spool-n1", "spool-n2"):
        (folder / name).mkdir(parents=True)
    ports = [free_port() for _ in range(3)]
    text = CONFIGURATION.format(
        host=socket.gethostname(), folder=folder, port=ports[0], n1=ports[1], n2=ports[2],
        srun_ports=f"{min(ports)}-{max(ports) + 200}",
    )  # fmt: skip
    (folder / "slurm.conf").write_text(text)
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
    socket_file = f"{folder}/munge.socket"
    commands = [
        ["munged", "--force", "--foreground", f"--socket={socket_file}", f"--key-file={key}",
         f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munged.log", f"--seed-file={folder}/seed"],
        ["slurmctld", "-D"],
        ["slurmd", "-D", "-N", "n1"],
        ["slurmd", "-D", "-N", "n2"],
    ]  # fmt: skip
    daemons = []
    try:
        for command in commands:
            log = (folder / f"{command[0]}-{command[-1]}.log".replace("/", "_")[-60:]).open("wb")
            daemons.append(subprocess.Popen(command, stdout=log, stderr=log, preexec_fn=die_with_parent))
            if command[0] == "munged":
                wait_until(lambda: Path(socket_file).exists(), seconds=20)
        wait_until(lambda: ask("sinfo", "-h", "-t", "idle", "-o", "%D").strip() == "2", seconds=60)
        yield
    finally:
        subprocess.run(["scancel", "-u", "root"], capture_output=True, timeout=30)
        until = time.monotonic() + 20
        while ask("squeue", "-h") and time.monotonic() < until:  # wait for jobs left by a failed test
            time.sleep(0.2)
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            try:
                daemon.wait(15)
            except subprocess.TimeoutExpired:
                daemon.kill()
        os.environ.pop("SLURM_CONF")
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts with a network link between them."""
    need_root()
    if not shutil.which("ip"):
        pytest.skip("needs the command ip (Debian: iproute2)")
    mark = f"{os.getpid() % 10000}{int(time.time()) % 1000}"
    pair = [Host(f"pace{mark}{end}", f"10.77.0.{number}", f"pv{mark}{end}") for number, end in ((1, "a"), (2, "b"))]
    try:
        for host in pair:
            try:
                ip("netns", "add", host.name)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"cannot create network namespaces: {error.stderr.strip()}")
        ip("link", "add", pair[0].interface, "type", "veth", "peer", "name", pair[1].interface)
        for host in pair:
            ip("link", "set", host.interface, "netns", host.name)
            ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", host.interface)
            for name in ("lo", host.interface):
                ip("-n", host.name, "link", "set", name, "up")
        yield pair[0], pair[1]
    finally:
        for host in pair:
            subprocess.run(["ip", "netns", "delete", host.name], capture_output=True, timeout=20)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """Start a real S3 server, with its credentials in the environment."""
    server = S3Server(find_weed(), tmp_path_factory.mktemp("s3") / "server")
    server.start()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        yield server
    server.kill()
