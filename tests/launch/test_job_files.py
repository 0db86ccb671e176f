"""Job files and launch commands pass user arguments unchanged and never execute them as shell code."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cli.app import run
from paceline.launch.command import plain_name

ODD = 'runs/it\'s $(touch pwned) `touch pwned` "x"; touch pwned #%j'
TIME = "2026-01-01T00:00:00"
SRUN = """#!/bin/bash
while [ "$1" != -m ]; do echo "$1" >> options; shift; done
printf '%s\\0' "$@" > words
trap 'echo asked > asked; exit ${CODE:-75}' USR1
[ -e hold ] && { touch began; while :; do sleep 0.1; done; }
exit 0
"""
SCONTROL = """#!/bin/sh
[ "$1" = show ] && { echo "JobId=1 JobState=${STATE:-RUNNING}${PREEMPTED:+ PreemptTime=$PREEMPTED}"; exit; }
echo "$@" >> scontrol
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with fake srun and scontrol commands that record how they were called."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "12345")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])  # "" stands for the current folder
    return tmp_path


def slurm(*more: str) -> int:
    return run(["launch", "slurm", "classification", "--nodes", "2", "--devices", "3", "--time", "2:00:00", *more])


def test_a_slurm_job_passes_user_arguments_unchanged(here: Path) -> None:
    odd = ("--no-deterministic", "--set", "save_every=3 steps", "--set", "few_images=allow")
    assert slurm("--out", ODD, *odd, "--cpus-per-node", "6") == 0
    subprocess.run(["bash", here / ODD / "launch" / "slurm.sh"], check=True, timeout=30)
    words = (here / "words").read_text().split("\0")[:-1]
    assert words[:4] == ["-m", "paceline", "train", "classification"]
    options = (here / "options").read_text().splitlines()
    assert "-P" in options, "random.py in the current folder is not imported"
    assert "--cpus-per-task=6" in options
    assert "#SBATCH --cpus-per-task=6\n" in (here / ODD / "launch" / "slurm.sh").read_text()
    assert words[words.index("--out") + 1] == ODD
    assert words[words.index("--set") + 1] == "save_every=3 steps"
    assert "--no-deterministic" in words
    assert words[-6:-1] == ["--devices", "3", "--nnodes", "2", "--rdzv"]
    assert words[-1] == f"{os.uname().nodename}:{10000 + 7919 * 12345 % 10000}"
    assert not list(here.rglob("pwned"))


def run_and_stop(here: Path, number: signal.Signals, **variables: str) -> tuple[int, str]:
    """Run a job script, send it a signal, and return its exit code and output."""
    (here / "hold").touch()
    assert slurm("--out", "run") == 0
    environment = {**os.environ, **variables}
    job = subprocess.Popen(["bash", "run/launch/slurm.sh"], stdout=subprocess.PIPE, text=True, env=environment)
    while not (here / "began").exists():
        assert job.poll() is None
    job.send_signal(number)
    output, _ = job.communicate(timeout=100)
    assert (here / "asked").exists()
    return job.returncode, output


@pytest.mark.parametrize(
    ("number", "variables", "line"),
    [
        (signal.SIGUSR1, {}, "saved a checkpoint; job requeued"),
        (signal.SIGUSR1, {"STATE": "COMPLETING"}, "saved a checkpoint; job requeued"),  # the time limit was reached
        (signal.SIGTERM, {"STATE": "COMPLETING", "PREEMPTED": TIME}, "saved a checkpoint; job requeued"),
        (signal.SIGTERM, {"CODE": "138", "PREEMPTED": TIME}, "stopped before training began; job requeued"),
    ],
)
def test_a_job_forwards_a_stop_signal_and_is_requeued(
    here: Path, number: signal.Signals, variables: dict[str, str], line: str
) -> None:
    code, output = run_and_stop(here, number, **variables)
    assert code == int(variables.get("CODE", 75)) and line in output
    assert (here / "scontrol").read_text().splitlines()[0] == "requeue 12345"


def test_a_job_that_the_user_cancels_or_with_no_requeue_is_not_requeued(here: Path) -> None:
    code, output = run_and_stop(here, signal.SIGTERM, STATE="COMPLETING")
    assert code == 75 and "requeued" not in output
    assert not (here / "scontrol").exists()
    assert slurm("--out", "run", "--no-requeue") == 0
    script = (here / "run" / "launch" / "slurm.sh").read_text()
    assert "#SBATCH --no-requeue" in script and "scontrol" not in script


ERRORS = {
    "--time soon": "--time soon",
    "--partition 'a; touch pwned'": "--partition 'a; touch pwned'",
    "--account 'a b'": "--account 'a b'",
    "--nodes 0": "'--nodes'",
    "--cpus-per-node -2": "--cpus-per-node -2: must be at least 0",
    "--gpus-per-node 2": "--devices 3: differs from --gpus-per-node 2; use only --gpus-per-node",
    "--nnodes 3": "--nnodes 3: differs from --nodes 2; use only --nodes",
    "--nnodes 1": "--nnodes 1: differs from --nodes 2",
    "--nnodes 1:2": "--nnodes 1:2: differs from --nodes 2",
    "--set nnodes=3": "--nnodes 3: differs from --nodes 2",
    "--rdzv host:1": "--rdzv host:1: launch sets the rendezvous, on the first host; leave it out",
    "--set rdzv=host:1": "--rdzv host:1: launch sets",
    "--gpus 0,1": "--gpus 0,1: differs from the number of devices per host, 3",
    "--name a/b": "--name a/b: must not be a path",
    "--batch-size 4": "batch",
    "--strategy single": "--strategy single: runs in a single process; use ddp, fsdp or lightning",
    "--out 'a\nb'": "line breaks",
    "--data-root https://me:secret@host/": "a credential",
    "--submit": "sinfo: SLURM is not installed on this machine",
}


@pytest.mark.parametrize(("words", "complaint"), ERRORS.items())
def test_invalid_options_are_rejected_in_one_line(
    here: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: str,
    complaint: str,
) -> None:
    monkeypatch.setenv("PATH", str(here / "tools"))
    assert slurm(*shlex.split(words)) == 2
    line = capsys.readouterr().err
    assert complaint in line and len(line.splitlines()) == 1 and "secret" not in line
    assert not (here / "runs").exists()


def test_a_job_may_list_several_partitions_and_needs_enough_hosts_in_one_of_them(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in {"sinfo": "echo 'main|2|(null)|up'; echo 'side|2|(null)|up'", "sbatch": "echo 7"}.items():
        (here / "tools" / name).write_text(f"#!/bin/sh\n{text}\n")
        (here / "tools" / name).chmod(0o755)
    assert slurm("--out", "run", "--submit", "--partition", "main,side") == 0
    assert "as job 7" in capsys.readouterr().out
    assert slurm("--out", "run", "--submit", "--partition", "main,sdie") == 2
    assert "unknown partition 'sdie'; did you mean 'side'?" in capsys.readouterr().err
    assert slurm("--out", "run", "--submit", "--partition", "main,side", "--nodes", "3") == 2
    assert "--nodes 3: the maximum for main,side is 2" in capsys.readouterr().err


def test_launch_torchrun_prints_the_command_for_each_host(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["launch", "torchrun", "classification", "--hosts", "a,b.c", "--devices", "4", "--out", ODD]) == 0
    parts = capsys.readouterr().out.strip().split("\n\n")
    assert [part.splitlines()[0] for part in parts] == ["# on a", "# on b.c"]
    for part in parts:
        words = shlex.split(part.partition("\n")[2].replace("\\\n", ""))
        assert words[:3] == ["paceline", "train", "classification"] and words[words.index("--out") + 1] == ODD
        assert words[-6:] == ["--devices", "4", "--nnodes", "2", "--rdzv", "a:29400"]


TORCHRUN_ERRORS = {
    "a,b --nnodes 3": "--nnodes 3: differs from --hosts 2; use only --hosts",
    "a,b --set nnodes=1": "--nnodes 1: differs from --hosts 2",
    "a,b --rdzv a:1": "--rdzv a:1: launch sets the rendezvous",
    "a,b --gpus 0,1 --devices 4": "--gpus 0,1: differs from the number of devices per host, 4",
    "a,,b": "--hosts: '' is not a host name",
    "a,a": "--hosts: a host is listed twice",
    "'a b,c'": "--hosts: 'a b' is not a host name",
    "'$(touch pwned),b'": "--hosts: '$(touch pwned)' is not a host name",
}


@pytest.mark.parametrize(("words", "complaint"), TORCHRUN_ERRORS.items())
def test_launch_torchrun_rejects_bad_hosts_and_flags_that_contradict_them(
    here: Path, capsys: pytest.CaptureFixture[str], words: str, complaint: str
) -> None:
    assert run(["launch", "torchrun", "classification", "--hosts", *shlex.split(words)]) == 2
    assert complaint in capsys.readouterr().err


def test_the_name_of_a_launched_run_selects_its_folder_and_agreeing_flags_are_accepted(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert slurm("--name", "mine", "--nnodes", "2", "--gpus-per-node", "3", "--gpus", "0,1,2") == 0
    script = (here / "runs" / "mine" / "launch" / "slurm.sh").read_text()
    assert "--job-name=mine\n" in script and "--nodes=2\n" in script and "--out runs/mine " in script
    capsys.readouterr()
    assert run(["launch", "torchrun", "classification", "--hosts", "a,b", "--name", "mine", "--gpus", "4,5"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("--out runs/mine ") == printed.count("--devices 2 ") == 2


def test_any_text_is_converted_to_a_valid_job_name() -> None:
    names = {"My Run": "my-run", "../../etc": "etc", "$(x)": "x", "7": "run-7", "": "run", "a" * 99: "a" * 40}
    names["7" * 99] = "run-" + "7" * 36
    assert {text: plain_name(text) for text in names} == names
