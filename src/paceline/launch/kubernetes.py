"""Kubernetes objects for a run: Kubeflow's TrainJob with a runtime of its own, or a plain Indexed Job.

The runtime is written along with the TrainJob, since volumes are stable there; how a TrainJob patches another's
runtime has changed with the versions of Kubeflow Trainer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import yaml

from paceline.core.errors import UserError
from paceline.core.secrets import has_credentials, is_private_name
from paceline.launch.command import TrainCommand, check_words

PORT = 29400
DATA, RUNS = "/data", "/runs"
USER = 1000  # the Containerfile's
TRAINER = "trainer.kubeflow.org/v1alpha1"
NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")
QUANTITY = re.compile(r"\d+(\.\d+)?(m|[kMGTPE]i?)?")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

Object = dict[str, Any]


@dataclass(frozen=True)
class KubernetesOptions:
    """What is asked of Kubernetes."""

    name: str
    image: str
    runs_claim: str
    data_claim: str = ""
    namespace: str = ""
    gpus_per_node: int = 0
    cpus: str = ""
    memory: str = ""
    shared_memory: str = "8Gi"
    environment: tuple[str, ...] = ()  # NAME=VALUE
    secrets: tuple[str, ...] = ()  # Secrets whose keys become environment variables

    def check(self) -> None:
        """Refuses names and amounts that Kubernetes would refuse, and credentials in the environment."""
        names = {"--name": self.name, "--runs-claim": self.runs_claim, "--data-claim": self.data_claim}
        for flag, name in [*names.items(), ("--namespace", self.namespace), *(("--secret", s) for s in self.secrets)]:
            if name and not NAME.fullmatch(name):
                raise UserError(f"{flag} {name!r}: expected up to 40 lower case letters, digits and hyphens")
        if not self.image:
            raise UserError("--image: name the container image to run (the repository's Containerfile makes one)")
        if not self.runs_claim:
            raise UserError("--runs-claim: name the PersistentVolumeClaim that keeps the run")
        check_words([self.image])
        for flag, amount in (("--memory", self.memory), ("--cpus", self.cpus), ("--shared-memory", self.shared_memory)):
            if amount and not QUANTITY.fullmatch(amount):
                raise UserError(f"{flag} {amount!r}: expected an amount like 4 or 8Gi")
        for word in self.environment:
            name, equals, value = word.partition("=")
            if not equals or not VARIABLE.fullmatch(name):
                raise UserError(f"--env {name}: expected NAME=VALUE")
            if is_private_name(name) or has_credentials(value):
                raise UserError(f"--env {name}: keep credentials in a Secret, and give its name with --secret")
            check_words([value])


def train_job(command: TrainCommand, options: KubernetesOptions) -> list[Object]:
    """Kubeflow's objects: a runtime with the volumes, and the job that uses it."""
    options.check()
    pod = _pod(command, options, f"{options.name}-node-0-0.{options.name}")
    container = pod["containers"][0]
    trainer = {
        "numNodes": command.nodes,
        "image": container.pop("image"),
        "command": container.pop("command"),
        "resourcesPerNode": container.pop("resources"),
    }
    if environment := container.pop("env", None):
        trainer["env"] = environment
    container["image"] = trainer["image"]
    node = {
        "name": "node",
        "template": {
            "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
            "spec": {"backoffLimit": _failures(command), "template": {"spec": pod}},
        },
    }
    runtime = {
        "apiVersion": TRAINER,
        "kind": "TrainingRuntime",
        "metadata": _metadata(options),
        "spec": {
            "mlPolicy": {"numNodes": command.nodes, "torch": {}},
            "template": {"spec": {"replicatedJobs": [node]}},
        },
    }
    job = {
        "apiVersion": TRAINER,
        "kind": "TrainJob",
        "metadata": _metadata(options),
        "spec": {
            "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": options.name},
            "trainer": trainer,
        },
    }
    return [runtime, job]


def plain_job(command: TrainCommand, options: KubernetesOptions) -> list[Object]:
    """An Indexed Job, and the headless Service through which its pods find the first one."""
    options.check()
    pod = _pod(command, options, f"{options.name}-0.{options.name}") | {"subdomain": options.name}
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(options),
        "spec": {
            "clusterIP": "None",
            "selector": {"job-name": options.name},
            "publishNotReadyAddresses": True,  # the pods meet before any is ready
            "ports": [{"name": "meeting", "port": PORT}],
        },
    }
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _metadata(options),
        "spec": {
            "completionMode": "Indexed",
            "completions": command.nodes,
            "parallelism": command.nodes,
            "backoffLimit": _failures(command),
            "template": {"metadata": {"labels": {"job-name": options.name}}, "spec": pod},
        },
    }
    return [service, job]


def to_yaml(objects: list[Object], note: str) -> str:
    """The objects as one file, with a note on how to use it."""
    documents = [yaml.safe_dump(one, sort_keys=False, allow_unicode=True, width=100) for one in objects]
    return f"# {note}\n" + "---\n".join(documents)


def _metadata(options: KubernetesOptions) -> Object:
    namespace = {"namespace": options.namespace} if options.namespace else {}
    return {"name": options.name, **namespace, "labels": {"app.kubernetes.io/managed-by": "paceline"}}


def _failures(command: TrainCommand) -> int:
    """How many ends of pods the job bears: each host may be preempted some times."""
    return 6 * command.nodes


def _pod(command: TrainCommand, options: KubernetesOptions, first: str) -> Object:
    """A host: one container, whose launcher starts a process for each device."""
    words = command.words(f"{first}:{PORT}", out=f"{RUNS}/{options.name}", **_data_root(options))
    check_words(words)
    amounts = {"nvidia.com/gpu": options.gpus_per_node, "cpu": options.cpus, "memory": options.memory}
    limits = {name: str(amount) for name, amount in amounts.items() if amount}
    mounts = [{"name": "shared-memory", "mountPath": "/dev/shm"}, {"name": "runs", "mountPath": RUNS}]
    volumes: list[Object] = [
        {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": options.shared_memory}},
        {"name": "runs", "persistentVolumeClaim": {"claimName": options.runs_claim}},
    ]
    if options.data_claim:
        mounts.append({"name": "data", "mountPath": DATA})
        volumes.append({"name": "data", "persistentVolumeClaim": {"claimName": options.data_claim}})
    container: Object = {
        "name": "node",
        "image": options.image,
        # Kubernetes replaces $(NAME) in a command; $$ stands for a $ that means nothing.
        "command": ["paceline", *(word.replace("$", "$$") for word in words)],
        "resources": {"limits": limits} if limits else {},
        "volumeMounts": mounts,
        "ports": [{"name": "meeting", "containerPort": PORT}],
    }
    pairs = [word.partition("=")[::2] for word in options.environment]
    if pairs:
        container["env"] = [{"name": name, "value": value.replace("$", "$$")} for name, value in pairs]
    if options.secrets:
        container["envFrom"] = [{"secretRef": {"name": name}} for name in options.secrets]
    # The image's user is not root; as the volumes' group it may write to them.
    rights = {"fsGroup": USER}
    return {"restartPolicy": "OnFailure", "securityContext": rights, "containers": [container], "volumes": volumes}


def _data_root(options: KubernetesOptions) -> dict[str, str]:
    return {"data_root": DATA} if options.data_claim else {}
