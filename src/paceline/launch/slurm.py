"""SLURM jobs: srun starts one launcher per host. A preempted job saves, is requeued and resumes."""

from __future__ import annotations

import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from paceline.core.errors import UserError, unknown
from paceline.core.files import replacing
from paceline.launch.child import path_flags
from paceline.launch.command import TrainCommand, check_words, plain_name, quoted
from paceline.parallel.group import FIRST_PORT, NUM_PORTS
from paceline.training.stop import RESUME_LATER

FOLDER = "launch"  # subfolder of the run folder that holds the job script and its logs
JOB_FILE = "slurm.sh"
WARNING_SECONDS = 120  # SLURM signals a job to save this long before its time limit
POLL_SECONDS = 1.0
TIME = re.compile(r"(\d+-)?\d+(:\d+){0,2}|infinite|unlimited", re.IGNORECASE)
WORD = re.compile(r"[\w.@,+-]+")


@dataclass(frozen=True)
class SlurmOptions:
    """The resources and limits to request from SLURM."""

    gpus_per_node: int = 0
    cpus_per_node: int = 0
    time: str = "1:00:00"
    partition: str = ""
    account: str = ""
    requeue: bool = True

    def check(self) -> None:
        """Raise UserError for values that SLURM would reject or misread."""
        if not TIME.fullmatch(self.time):
            raise UserError(f"--time {self.time}: expected hours:minutes:seconds, like 2:00:00")
        if self.cpus_per_node < 0:
            raise UserError(f"--cpus-per-node {self.cpus_per_node}: must be at least 0")
        for flag, value in (("--partition", self.partition), ("--account", self.account)):
            if value and not WORD.fullmatch(value):
                raise UserError(f"{flag} {value!r}: expected a name made of letters, digits and . _ - @ +")


def job_script(command: TrainCommand, options: SlurmOptions, run: Path) -> str:
    """Return a human-readable job script for sbatch."""
    options.check()
    words = command.words("\0", out=str(run))
    check_words(word for word in [*words, str(run)] if word != "\0")
    log = str(Path.cwd() / run / FOLDER).replace("%", "%%") + "/slurm-%j.log"
    directives = {
        "job-name": plain_name(run.name),
        "nodes": command.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": options.gpus_per_node,
        "cpus-per-task": options.cpus_per_node,
        "time": options.time,
        "partition": options.partition,
        "account": options.account,
        "output": shlex.quote(log),
        "open-mode": "append",
        "signal": f"B:USR1@{WARNING_SECONDS}",
    }
    lines = [f"#SBATCH --{name}={value}" for name, value in directives.items() if value]
    lines.append("#SBATCH --requeue" if options.requeue else "#SBATCH --no-requeue")
    # Since SLURM 22.05, srun does not use the number of cores per task that the job requested.
    cores = f" --cpus-per-task={options.cpus_per_node}" if options.cpus_per_node else ""
    python = [sys.executable, *path_flags()]
    train = quoted([*python, "-m", "paceline", *words]).replace(shlex.quote("\0"), '"$rendezvous"')
    again = f"""
# If SLURM ends a job that it neither warned with USR1 nor preempted, a user has cancelled it: do not requeue it.
cancelled= preempted=
case "$(scontrol show job -o "$SLURM_JOB_ID")" in
    *PreemptTime=[0-9]*) preempted=yes ;;
    *JobState=RUNNING*) ;;
    *) [ -z "$warned" ] && cancelled=yes ;;
esac
case "$code" in
    {RESUME_LATER}) [ -z "$cancelled" ] && again="saved a checkpoint" ;;
    {128 + signal.SIGUSR1}|{128 + signal.SIGTERM}) [ -n "$preempted" ] && again="stopped before training began" ;;
esac
if [ -n "$again" ]; then
    echo "$again; job requeued"
    scontrol requeue "$SLURM_JOB_ID"
    scontrol update JobId="$SLURM_JOB_ID" StartTime=now 2>/dev/null
fi
"""
    return f"""#!/bin/bash
# Written by paceline launch slurm. Submit it with: sbatch {shlex.quote(str(run / FOLDER / JOB_FILE))}
{chr(10).join(lines)}

cd {shlex.quote(str(Path.cwd()))} || exit 1

# The rendezvous is on the first host, which runs this script. Its port is derived from the job ID.
rendezvous="$(hostname):$(({FIRST_PORT} + (7919 * SLURM_JOB_ID) % {NUM_PORTS}))"

# SLURM sends USR1 before the time limit and TERM before preemption. All hosts then finish the same step and save.
step= stop_requested= warned= again=
request_stop() {{ stop_requested=yes; [ -n "$step" ] && kill -USR1 "$step"; }}
trap 'warned=yes; request_stop' USR1
trap request_stop TERM

srun --kill-on-bad-exit=0 --wait=60{cores} \\
    {train} &
step=$! code=0
while :; do
    stop_requested=
    wait "$step"
    now=$?
    [ "$now" -ne 127 ] && code=$now
    [ -n "$stop_requested" ] || break
done
{again if options.requeue else ""}
exit "$code"
"""


def write_job(script: str, run: Path) -> Path:
    """Write the job script to the run folder and return its path."""
    try:
        (run / FOLDER).mkdir(parents=True, exist_ok=True)
        file = run / FOLDER / JOB_FILE
        with replacing(file) as temporary:
            temporary.write_text(script)
            temporary.chmod(0o755)
    except OSError as error:
        raise UserError(f"--out {run}: {error.strerror}") from None
    return file


def check_cluster(command: TrainCommand, options: SlurmOptions) -> None:
    """Raise UserError if the cluster lacks the partition, hosts, GPUs or ports that the job needs."""
    rows = [line.split("|") for line in _query("sinfo", "-h", "-o", "%R|%D|%G|%a").splitlines()]
    names, wanted = sorted({row[0] for row in rows}), options.partition.split(",") if options.partition else []
    for partition in wanted:
        if partition not in names:
            raise UserError(f"--partition: {unknown('partition', partition, names)}")
    mine = [row for row in rows if not wanted or row[0] in wanted]
    # A job runs in one of the partitions.
    hosts = max((sum(int(row[1]) for row in mine if row[0] == name) for name in wanted or names), default=0)
    if command.nodes > hosts:
        raise UserError(f"--nodes {command.nodes}: the maximum for {options.partition or 'this cluster'} is {hosts}")
    # A list of resources looks like `gpu:a100:4(S:0-1),shard:8`.
    gpus = max((sum(map(int, re.findall(r"(?:^|,)gpu(?::[^,:(]+)?:(\d+)", row[2]))) for row in mine), default=0)
    if options.gpus_per_node > gpus:
        raise UserError(f"--gpus-per-node {options.gpus_per_node}: SLURM lists at most {gpus} per host")
    _check_ports(command.nodes)


def _check_ports(nodes: int) -> None:
    """Raise UserError if srun has too few ports, since srun would wait for a port without printing anything."""
    found = re.search(r"^SrunPortRange\s*=\s*(\d+)-(\d+)", _query("scontrol", "show", "config"), re.MULTILINE)
    first, last = map(int, found.groups()) if found else (0, 0)
    needed = 3 + 2 * (-(-nodes // 48))  # srun listens on three ports, plus two for every 48 hosts
    if last and last - first + 1 < needed:
        raise UserError(
            f"--nodes {nodes}: srun needs {needed} ports, but SLURM's SrunPortRange {first}-{last} has only "
            f"{last - first + 1}; ask the cluster's administrators for more"
        )


def submit_job(file: Path) -> int:
    """Submit the job script and return the job ID."""
    answer = _query("sbatch", "--parsable", str(file))
    return int(answer.split(";")[0])


def follow(job: int, run: Path) -> int:
    """Print the job's log as it grows, until the job ends; return its exit code."""
    log, shown = run / FOLDER / f"slurm-{job}.log", 0
    try:
        while True:
            state, code = _state(job)
            if log.exists():
                with log.open("rb") as file:
                    file.seek(shown)
                    new = file.read()
                shown += len(new)
                sys.stdout.write(new.decode(errors="replace"))
                sys.stdout.flush()
            if state not in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED", "SUSPENDED"):
                print(f"job {job}: {state.lower()}")
                return code if state != "COMPLETED" else 0
            time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:
        print(
            f"\njob {job} keeps running; `scancel {job}` cancels it, "
            f"and `tail -f {shlex.quote(str(log))}` shows its log"
        )
        return 0


def _state(job: int) -> tuple[str, int]:
    """Return a job's state and exit code, which is 128 + N after signal N."""
    answer = _query("scontrol", "show", "job", "-o", str(job))
    found = re.search(r"JobState=(\w+)", answer)
    code = re.search(r"ExitCode=(\d+):(\d+)", answer)
    number = (int(code[1]) or (128 + int(code[2]) if int(code[2]) else 0)) if code else 1
    return (found[1] if found else "UNKNOWN"), number or 1


def _query(*words: str) -> str:
    """Return the output of a SLURM command."""
    if not shutil.which(words[0]):
        raise UserError(
            f"{words[0]}: SLURM is not installed on this machine; run this on a login node, or leave out --submit"
        )
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        raise UserError(f"{words[0]}: SLURM did not respond within 60 s; try again later") from None
    if done.returncode:
        raise UserError(f"{' '.join(words[:2])}: {' '.join(done.stderr.split()) or done.returncode}")
    return done.stdout
