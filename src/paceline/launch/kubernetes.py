"""Kubernetes objects for a run: a Kubeflow TrainJob with its own runtime, or a plain Indexed Job.

The TrainJob gets its own runtime because a runtime's volume fields are stable, whereas the way in which a TrainJob
patches a shared runtime has changed between versions of Kubeflow Trainer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import yaml

from paceline.core.errors import UserError
from paceline.core.text import has_credentials, is_private_name
from paceline.core.types import JsonObject
from paceline.launch.command import TrainCommand, check_words, settings_in

PORT, PORT_NAME = 29400, "rendezvous"
DATA, RUNS = "/data", "/runs"
USER = 1000  # user ID in the Containerfile
FAILURES_PER_HOST = 6  # how many pod failures to tolerate: each host may be preempted several times
TRAINER = "trainer.kubeflow.org/v1alpha1"
NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")
LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
NAMESPACE, CLAIM = re.compile(LABEL), re.compile(rf"(?=.{{1,253}}$){LABEL}(\.{LABEL})*")  # names of existing objects
QUANTITY = re.compile(r"\d+(\.\d+)?(m|k|Ki|[MGTPE]i?)?")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class KubernetesOptions:
    """The image, volumes and resources of a job on Kubernetes."""

    name: str
    image: str
    runs_claim: str
    data_claim: str = ""
    namespace: str = ""
    gpus_per_node: int = 0
    cpus: str = ""
    memory: str = ""
    shared_memory: str = "8Gi"
    environment: tuple[str, ...] = ()  # NAME=VALUE pairs
    secrets: tuple[str, ...] = ()  # names of Secrets whose keys become environment variables

    def check(self) -> None:
        """Raise UserError for values that Kubernetes would reject, and for credentials in the environment."""
        claims = [("--runs-claim", self.runs_claim), ("--data-claim", self.data_claim)]
        claims += [("--secret", secret) for secret in self.secrets]
        amounts = [("--memory", self.memory), ("--cpus", self.cpus), ("--shared-memory", self.shared_memory)]
        for flag, value, form, expected in (
            ("--name", self.name, NAME, "up to 40 lowercase letters, digits and hyphens"),
            ("--namespace", self.namespace, NAMESPACE, "up to 63 lowercase letters, digits and hyphens"),
            *((flag, claim, CLAIM, "lowercase letters, digits, hyphens and dots") for flag, claim in claims),
            *((flag, amount, QUANTITY, "an amount like 4 or 8Gi") for flag, amount in amounts),
        ):
            if value and not form.fullmatch(value):
                raise UserError(f"{flag} {value!r}: expected {expected}")
        if not self.image:
            raise UserError(
                "--image: missing; pass the container image to run (the repository's Containerfile builds one)"
            )
        if not self.runs_claim:
            raise UserError("--runs-claim: missing; pass the name of a PersistentVolumeClaim for the run folder")
        check_words([self.image])
        for word in self.environment:
            name, equals, value = word.partition("=")
            if not equals or not VARIABLE.fullmatch(name):
                raise UserError(f"--env {name}: expected NAME=VALUE")
            if is_private_name(name) or has_credentials(value):
                raise UserError(f"--env {name}: keep credentials in a Secret, and pass its name with --secret")
            check_words([value])


def train_job(command: TrainCommand, options: KubernetesOptions) -> list[JsonObject]:
    """Return the Kubeflow objects: a runtime with the volumes, and the job that uses it."""
    options.check()
    work = _work(command, options, f"{options.name}-node-0-0.{options.name}")
    trainer = {"numNodes": command.nodes, "image": options.image, "command": work["command"]}
    trainer |= {"resourcesPerNode": work["resources"], **({"env": work["env"]} if "env" in work else {})}
    pods = {
        "backoffLimit": FAILURES_PER_HOST * command.nodes,
        "template": {"spec": _pod(options, _container(options))},
    }
    labels = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    node = {"name": "node", "template": {"metadata": {"labels": labels}, "spec": pods}}
    policy = {"numNodes": command.nodes, "torch": {}}
    reference = {"apiGroup": TRAINER.partition("/")[0], "kind": "TrainingRuntime", "name": options.name}
    return [
        _object(options, TRAINER, "TrainingRuntime", mlPolicy=policy, template={"spec": {"replicatedJobs": [node]}}),
        _object(options, TRAINER, "TrainJob", runtimeRef=reference, trainer=trainer),
    ]


def plain_job(command: TrainCommand, options: KubernetesOptions) -> list[JsonObject]:
    """Return an Indexed Job, and the headless Service that lets its pods find the first pod."""
    options.check()
    work = _work(command, options, f"{options.name}-0.{options.name}")
    pod, labels = _pod(options, _container(options) | work), {"job-name": options.name}
    service = _object(
        options,
        "v1",
        "Service",
        clusterIP="None",
        selector=labels,
        publishNotReadyAddresses=True,  # pods must find each other before any of them is ready
        ports=[{"name": PORT_NAME, "port": PORT}],
    )
    job = _object(
        options,
        "batch/v1",
        "Job",
        completionMode="Indexed",
        completions=command.nodes,
        parallelism=command.nodes,
        backoffLimit=FAILURES_PER_HOST * command.nodes,
        template={"metadata": {"labels": labels}, "spec": {**pod, "subdomain": options.name}},
    )
    return [service, job]


def to_yaml(objects: list[JsonObject], note: str) -> str:
    """Return the objects as one YAML file that begins with `note` as a comment."""
    documents = [yaml.safe_dump(one, sort_keys=False, allow_unicode=True, width=100) for one in objects]
    return f"# {note}\n" + "---\n".join(documents)


def _object(options: KubernetesOptions, api: str, kind: str, **spec: Any) -> JsonObject:
    namespace: JsonObject = {"namespace": options.namespace} if options.namespace else {}
    metadata: JsonObject = {"name": options.name, **namespace, "labels": {"app.kubernetes.io/managed-by": "paceline"}}
    return {"apiVersion": api, "kind": kind, "metadata": metadata, "spec": spec}


def _work(command: TrainCommand, options: KubernetesOptions, first: str) -> JsonObject:
    """Return what a host's container runs: a launcher, which starts one process per device."""
    given = {**command.flags, **settings_in(command.assignments)}.get("data_root", DATA)
    data_root = {"data_root": str(given)} if options.data_claim else {}
    if data_root and not PurePosixPath(str(given)).is_relative_to(DATA):
        raise UserError(f"--data-root {given}: not in {DATA}, where --data-claim is mounted; use a folder in {DATA}")
    words = command.words(f"{first}:{PORT}", out=f"{RUNS}/{options.name}", **data_root)
    check_words(words)
    amounts = {"nvidia.com/gpu": options.gpus_per_node, "cpu": options.cpus, "memory": options.memory}
    limits: JsonObject = {name: str(amount) for name, amount in amounts.items() if amount}
    work: JsonObject = {
        "command": ["paceline", *map(_literal, words)],
        "resources": {"limits": limits} if limits else {},
    }
    pairs = [word.partition("=")[::2] for word in options.environment]
    if pairs:
        work["env"] = [{"name": name, "value": _literal(value)} for name, value in pairs]
    return work


def _literal(word: str) -> str:
    """Escape a word for Kubernetes, which expands $(NAME) and reads $$ as a literal $."""
    return word.replace("$", "$$")


def _container(options: KubernetesOptions) -> JsonObject:
    """Return a host's container without its command: image, volumes, rendezvous port and secrets."""
    container: JsonObject = {
        "name": "node",
        "image": options.image,
        "volumeMounts": [{"name": name, "mountPath": path} for name, path, _ in _volumes(options)],
        "ports": [{"name": PORT_NAME, "containerPort": PORT}],
    }
    if options.secrets:
        container["envFrom"] = [{"secretRef": {"name": name}} for name in options.secrets]
    return container


def _pod(options: KubernetesOptions, container: JsonObject) -> JsonObject:
    """Return the pod for one host: a container and its volumes."""
    return {
        "restartPolicy": "OnFailure",
        # The image's user is not root. fsGroup lets this user write to the volumes.
        "securityContext": {"fsGroup": USER},
        "containers": [container],
        "volumes": [{"name": name, **origin} for name, _, origin in _volumes(options)],
    }


def _volumes(options: KubernetesOptions) -> list[tuple[str, str, JsonObject]]:
    """Return the name, mount path and source of each volume."""
    volumes: list[tuple[str, str, JsonObject]] = [
        ("shared-memory", "/dev/shm", {"emptyDir": {"medium": "Memory", "sizeLimit": options.shared_memory}}),
        ("runs", RUNS, {"persistentVolumeClaim": {"claimName": options.runs_claim}}),
    ]
    if options.data_claim:
        volumes.append(("data", DATA, {"persistentVolumeClaim": {"claimName": options.data_claim}}))
    return volumes
