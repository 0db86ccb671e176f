"""`paceline launch`: the job file, or the commands, that train on other machines."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.commands.configure import configure
from paceline.commands.train import default_folder
from paceline.config.resolve import Config
from paceline.config.spans import split_batch
from paceline.core.errors import UserError
from paceline.core.registry import load_classes
from paceline.core.types import SettingValue
from paceline.launch.command import TrainCommand, check_words, plain_name, quoted
from paceline.launch.kubernetes import KubernetesOptions, plain_job, to_yaml, train_job
from paceline.launch.slurm import SlurmOptions, check_cluster, follow, job_script, submit_job, write_job
from paceline.parallel.strategy import Strategy, strategy_class

HOST = re.compile(r"[A-Za-z0-9]([\w.:-]*\w)?")


def prepare(
    recipe: str,
    flags: Mapping[str, SettingValue],
    config_file: str,
    assignments: Sequence[str],
    *,
    nodes: int,
    gpus: int,
) -> tuple[Config, TrainCommand]:
    """Return a run's settings and the command for its hosts, checked as far as this machine can."""
    if nodes < 1:
        raise UserError(f"--nodes {nodes}: must be at least 1")
    if gpus < 0:
        raise UserError(f"--gpus-per-node {gpus}: must be at least 0")
    config = configure(recipe, flags, config_file=config_file, assignments=assignments, elsewhere=True)
    devices = gpus or config.run.devices
    if gpus and config.run.devices not in (1, gpus):
        raise UserError(f"--devices {config.run.devices}: differs from --gpus-per-node {gpus}; leave one out")
    several = config.with_run(devices=nodes * devices)
    if nodes * devices > 1 and not strategy_class(several).needs_processes:
        raise UserError(f"--strategy {config.run.strategy}: runs in one process; use {_strategies_in_processes()}")
    split_batch(config.run.batch_size, nodes * devices, config.run.accumulate)  # raises for a batch that is too small
    command = TrainCommand(recipe, flags, config_file, tuple(assignments), nodes, devices, config.run.join_timeout)
    return config, command


def launch_slurm(config: Config, command: TrainCommand, options: SlurmOptions, *, submit: bool, wait: bool) -> int:
    """Write the job's script into the run's folder; submit it and follow its log on request."""
    run = Path(config.run.out or default_folder(config))
    script = job_script(command, options, run)
    if submit or wait:
        check_cluster(command, options)
    file = write_job(script, run)
    if not (submit or wait):
        print(f"wrote {file}; submit it with --submit, or: {quoted(['sbatch', str(file)])}")
        return 0
    job = submit_job(file)
    print(f"job {job} of {file}")
    return follow(job, run) if wait else 0


def launch_kubernetes(command: TrainCommand, options: KubernetesOptions, to: str, *, plain: bool, submit: bool) -> int:
    """Write the objects of the run to a file; apply them to the cluster on request."""
    file = Path(to or f"{options.name}.yaml")
    objects = plain_job(command, options) if plain else train_job(command, options)
    apply = ["kubectl", "apply", "-f", str(file)]
    try:
        file.write_text(to_yaml(objects, f"Written by paceline launch kubernetes. Apply it with: {quoted(apply)}"))
    except OSError as error:
        raise UserError(f"--to {file}: {error.strerror}") from None
    if not submit:
        print(f"wrote {file}; apply it with --submit, or: {quoted(apply)}")
        return 0
    if not shutil.which("kubectl"):
        raise UserError(f"kubectl: not installed on this machine; {file} is written, apply it where kubectl is")
    return subprocess.run(apply).returncode


def launch_torchrun(command: TrainCommand, hosts: Sequence[str], port: int) -> int:
    """Print the command for each host; the rendezvous is on the first one."""
    for host in hosts:
        if not HOST.fullmatch(host):
            raise UserError(f"--hosts: {host!r} is not a host name; give names or addresses with commas")
    if len(set(hosts)) < len(hosts):
        raise UserError("--hosts: lists a host twice; --devices sets the number of processes on each host")
    if not 1024 <= port < 65536:
        raise UserError(f"--port {port}: must be from 1024 to 65535")
    first = f"[{hosts[0]}]" if ":" in hosts[0] else hosts[0]
    words = ["paceline", *command.words(f"{first}:{port}")]
    check_words(words)
    for host in hosts:
        print(f"# on {host}\n{quoted(words)}\n")
    return 0


def job_name(config: Config, name: str) -> str:
    """Return a job's name: the given one, or the run folder's."""
    return name or plain_name(Path(config.run.out or default_folder(config)).name)


def _strategies_in_processes() -> str:
    classes = load_classes("strategy", Strategy)
    return " or ".join(name for name, strategy in classes.items() if strategy.needs_processes)
