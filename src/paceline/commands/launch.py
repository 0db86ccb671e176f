"""`paceline launch`: write a job file or print the commands for training on other machines."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.commands.configure import configure
from paceline.commands.train import default_folder
from paceline.config.resolve import Config
from paceline.config.settings import split_batch
from paceline.core.errors import UserError
from paceline.core.files import new_file, user_path
from paceline.core.registry import load_classes
from paceline.core.text import print_line
from paceline.core.types import SettingValue
from paceline.launch.command import TrainCommand, check_words, plain_name, quoted, settings_in
from paceline.launch.kubernetes import KubernetesOptions, plain_job, to_yaml, train_job
from paceline.launch.slurm import SlurmOptions, check_cluster, follow, job_script, submit_job, write_job
from paceline.parallel.strategy import Strategy, strategy_class
from paceline.parallel.world import gpu_ids

HOST = re.compile(r"[A-Za-z0-9]([\w.:-]*\w)?")


def prepare(
    recipe: str,
    flags: Mapping[str, SettingValue],
    config_file: str,
    assignments: Sequence[str],
    *,
    nodes: int,
    gpus: int,
    nodes_flag: str = "--nodes",
) -> tuple[Config, TrainCommand]:
    """Return a run's settings and the command for its hosts, without checking this machine's devices."""
    config = configure(recipe, flags, config_file=config_file, assignments=assignments, elsewhere=True)
    given = {*flags, *settings_in(assignments)}
    for name, flag, number in (("devices", "--gpus-per-node", gpus), ("nnodes", nodes_flag, nodes)):
        value = str(getattr(config.run, name))
        if number and value != str(number) and (name in given or value != "1"):  # "1" is the default
            raise UserError(f"--{name} {value}: differs from {flag} {number}; use only {flag}")
    if "rdzv" in given:
        raise UserError(f"--rdzv {config.run.rdzv}: launch sets the rendezvous, on the first host; leave it out")
    ids = len(gpu_ids(config.run)) if config.run.gpus else 0
    devices = gpus or (ids if ids and "devices" not in given else config.run.devices)
    if ids not in (0, devices):
        raise UserError(f"--gpus {config.run.gpus}: differs from the number of devices per host, {devices}")
    several = config.with_run(devices=nodes * devices)
    if nodes * devices > 1 and not strategy_class(several).needs_processes:
        raise UserError(f"--strategy {config.run.strategy}: runs in a single process; use {_strategies_in_processes()}")
    # Raises UserError if the batch is too small for the number of devices.
    split_batch(config.run.batch_size, nodes * devices, config.run.accumulate)
    command = TrainCommand(recipe, flags, config_file, tuple(assignments), nodes, devices, config.run.join_timeout)
    return config, command


def launch_slurm(config: Config, command: TrainCommand, options: SlurmOptions, *, submit: bool, wait: bool) -> int:
    """Write the job script to the run folder; optionally submit it and follow its log."""
    run = Path(config.run.out or default_folder(config))
    script = job_script(command, options, run)
    if submit or wait:
        check_cluster(command, options)
    file = write_job(script, run)
    if not (submit or wait):
        print_line(f"wrote {file}; submit it with --submit, or: {quoted(['sbatch', str(file)])}")
        return 0
    job = submit_job(file)
    print_line(f"submitted {file} as job {job}")
    return follow(job, run) if wait else 0


def launch_kubernetes(command: TrainCommand, options: KubernetesOptions, to: str, *, plain: bool, submit: bool) -> int:
    """Write the run's Kubernetes objects to a file; optionally apply them to the cluster."""
    file = user_path(to or f"{options.name}.yaml")
    objects = plain_job(command, options) if plain else train_job(command, options)
    apply = ["kubectl", "apply", "-f", str(file)]
    with new_file(file, "--to") as temporary:
        temporary.write_text(to_yaml(objects, f"Written by paceline launch kubernetes. Apply it with: {quoted(apply)}"))
    if not submit:
        print_line(f"wrote {file}; apply it with --submit, or: {quoted(apply)}")
        return 0
    if not shutil.which("kubectl"):
        raise UserError(f"kubectl: not installed on this machine; apply {file} on a machine that has kubectl")
    return subprocess.run(apply).returncode


def launch_torchrun(command: TrainCommand, hosts: Sequence[str], port: int) -> int:
    """Print the command for each host; the rendezvous runs on the first host."""
    for host in hosts:
        if not HOST.fullmatch(host):
            raise UserError(f"--hosts: {host!r} is not a host name; use comma-separated names or addresses")
    if len(set(hosts)) < len(hosts):
        raise UserError("--hosts: a host is listed twice; use --devices to set the number of processes per host")
    first = f"[{hosts[0]}]" if ":" in hosts[0] else hosts[0]
    words = ["paceline", *command.words(f"{first}:{port}")]
    check_words(words)
    for host in hosts:
        print(f"# on {host}\n{quoted(words)}\n")
    return 0


def job_name(config: Config, name: str) -> str:
    """Return the job name given by the user or, by default, a name derived from the run folder."""
    return name or plain_name(Path(config.run.out or default_folder(config)).name)


def _strategies_in_processes() -> str:
    classes = load_classes("strategy", Strategy)
    *names, last = (name for name, strategy in classes.items() if strategy.needs_processes)
    return f"{', '.join(names)} or {last}"
