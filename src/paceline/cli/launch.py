"""Command-line arguments for `paceline launch slurm|kubernetes|torchrun`."""

from __future__ import annotations

from typing import Annotated

import typer

from paceline.cli.flags import Assignments, ConfigFile, Flags, RecipeName, RunName, with_name, with_options
from paceline.cli.help import CONTEXT, EXAMPLES, Command, Commands

launch = typer.Typer(
    cls=Commands,
    help="Write a job file, or print the commands, to train on other machines.",
    context_settings=CONTEXT,
    rich_markup_mode=None,
)
Nodes = Annotated[int, typer.Option("--nodes", min=1, help="number of hosts")]
GpusPerNode = Annotated[
    int,
    typer.Option(
        "--gpus-per-node",
        min=0,
        help="GPUs per host; 0 trains on the CPU with --devices processes per host (default: 0)",
    ),
]
Submit = Annotated[bool, typer.Option("--submit", help="also submit the job to the cluster")]


@launch.callback(invoke_without_command=True)
def without_command(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


@launch.command(cls=Command, epilog=EXAMPLES["launch slurm"])
@with_options()
def slurm(
    recipe: RecipeName,
    flags: Flags,
    name: RunName = "",
    nodes: Nodes = 1,
    gpus_per_node: GpusPerNode = 0,
    cpus_per_node: Annotated[int, typer.Option(help="CPU cores per host")] = 0,
    time: Annotated[str, typer.Option(help="time limit for the job, e.g. 2:00:00")] = "1:00:00",
    partition: Annotated[str, typer.Option(help="the SLURM partition to submit to")] = "",
    account: Annotated[str, typer.Option(help="the SLURM account to charge")] = "",
    requeue: Annotated[
        bool,
        typer.Option(
            "--requeue/--no-requeue", help="requeue the job after preemption or at its time limit, and resume the run"
        ),
    ] = True,
    submit: Submit = False,
    wait: Annotated[bool, typer.Option("--wait", help="submit the job and follow its log until it ends")] = False,
    config: ConfigFile = "",
    set_: Assignments = [],  # noqa: B006
) -> None:
    """Write a SLURM job script to the run folder."""
    from paceline.commands.launch import launch_slurm, prepare
    from paceline.launch.slurm import SlurmOptions

    settings, command = prepare(recipe, with_name(flags, name), config, set_, nodes=nodes, gpus=gpus_per_node)
    options = SlurmOptions(gpus_per_node, cpus_per_node, time, partition, account, requeue)
    raise typer.Exit(launch_slurm(settings, command, options, submit=submit, wait=wait))


@launch.command(cls=Command, epilog=EXAMPLES["launch kubernetes"])
@with_options()
def kubernetes(
    recipe: RecipeName,
    flags: Flags,
    image: Annotated[str, typer.Option(help="the container image to run")] = "",
    name: Annotated[
        str, typer.Option(help="name of the job and of its run folder, /runs/NAME (default: derived from --out)")
    ] = "",
    nodes: Nodes = 1,
    gpus_per_node: GpusPerNode = 0,
    runs_claim: Annotated[str, typer.Option(help="PersistentVolumeClaim for the run folder")] = "",
    data_claim: Annotated[str, typer.Option(help="PersistentVolumeClaim with the source's files")] = "",
    namespace: Annotated[str, typer.Option(help="Kubernetes namespace for the job")] = "",
    cpus: Annotated[str, typer.Option(help="CPU cores per host")] = "",
    memory: Annotated[str, typer.Option(help="memory per host, e.g. 64Gi")] = "",
    shared_memory: Annotated[str, typer.Option(help="shared memory per host, for loader workers")] = "8Gi",
    env: Annotated[
        list[str], typer.Option(help="an environment variable for the job; can be repeated", metavar="NAME=VALUE")
    ] = [],  # noqa: B006
    secret: Annotated[
        list[str], typer.Option(help="a Kubernetes Secret whose keys become environment variables; can be repeated")
    ] = [],  # noqa: B006
    plain: Annotated[
        bool, typer.Option("--plain", help="write an Indexed Job and a Service, neither of which needs Kubeflow")
    ] = False,
    to: Annotated[str, typer.Option(help="the file to write (default: NAME.yaml)", metavar="FILE")] = "",
    submit: Submit = False,
    config: ConfigFile = "",
    set_: Assignments = [],  # noqa: B006
) -> None:
    """Write a Kubeflow TrainJob or a plain Job for Kubernetes."""
    from paceline.commands.launch import job_name, launch_kubernetes, prepare
    from paceline.launch.kubernetes import KubernetesOptions

    settings, command = prepare(recipe, flags, config, set_, nodes=nodes, gpus=gpus_per_node)
    options = KubernetesOptions(
        job_name(settings, name), image, runs_claim, data_claim, namespace, gpus_per_node, cpus, memory, shared_memory,
        tuple(env), tuple(secret),
    )  # fmt: skip
    raise typer.Exit(launch_kubernetes(command, options, to, plain=plain, submit=submit))


@launch.command(cls=Command, epilog=EXAMPLES["launch torchrun"])
@with_options()
def torchrun(
    recipe: RecipeName,
    flags: Flags,
    hosts: Annotated[str, typer.Option(help="comma-separated host names; the rendezvous runs on the first host")],
    name: RunName = "",
    port: Annotated[int, typer.Option(min=1024, max=65535, help="rendezvous port on the first host")] = 29400,
    config: ConfigFile = "",
    set_: Assignments = [],  # noqa: B006
) -> None:
    """Print the command to run on each host."""
    from paceline.commands.launch import launch_torchrun, prepare

    names, flags = hosts.split(","), with_name(flags, name)
    _, command = prepare(recipe, flags, config, set_, nodes=len(names), gpus=0, nodes_flag="--hosts")
    raise typer.Exit(launch_torchrun(command, names, port))
