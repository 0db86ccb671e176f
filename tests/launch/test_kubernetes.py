"""The generated Kubernetes files are valid, and user arguments reach the container unchanged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.cli.app import run
from paceline.core.errors import UserError
from paceline.launch.kubernetes import KubernetesOptions

kubernetes_validate = pytest.importorskip("kubernetes_validate")

COMMAND = ("launch", "kubernetes", "classification", "--nodes", "2", "--gpus-per-node", "4", "--image", "paceline:1")
VOLUMES = ("--runs-claim", "runs", "--data-claim", "photos", "--memory", "67108864Ki", "--cpus", "16")
ODD = "a $(HOME) `touch pwned` 'b' \"c\" ../d: #e"


def written(folder: Path, *more: str) -> list[dict[str, Any]]:
    file = folder / "job.yaml"
    assert run([*COMMAND, *VOLUMES, "--to", str(file), *more]) == 0
    return list(yaml.safe_load_all(file.read_text()))


def test_the_file_is_written_to_a_new_folder_and_replaces_an_earlier_one(tmp_path: Path) -> None:
    for nodes in ("2", "3"):
        job = written(tmp_path / "new", "--plain", "--nodes", nodes)[-1]
        assert job["spec"]["completions"] == int(nodes)
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["job.yaml"]


def check_core(one: dict[str, Any]) -> None:
    kubernetes_validate.validate(one, "1.33", strict=True)


def words(pod: dict[str, Any]) -> list[str]:
    """Return the command as the container receives it, that is, with $$ replaced by $."""
    return [word.replace("$$", "$") for word in pod["containers"][0]["command"]]


def test_a_plain_job_is_valid_and_its_pods_connect_through_the_service(tmp_path: Path) -> None:
    service, job = written(tmp_path, "--plain", "--out", "my run", "--env", "NCCL_DEBUG=INFO", "--secret", "s3-keys")
    for one in (service, job):
        check_core(one)
    pod = job["spec"]["template"]["spec"]
    assert service["metadata"]["name"] == pod["subdomain"] == "my-run"
    assert service["spec"]["selector"].items() <= job["spec"]["template"]["metadata"]["labels"].items()
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 2
    command = words(pod)
    assert command[command.index("--rdzv") + 1] == "my-run-0.my-run:29400"
    assert (
        command[command.index("--out") + 1] == "/runs/my-run" and command[command.index("--data-root") + 1] == "/data"
    )
    assert (
        command[command.index("--devices") + 1] == "4"
        and pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "4"
    )
    assert {"name": "shared-memory", "mountPath": "/dev/shm"} in pod["containers"][0]["volumeMounts"]
    assert pod["containers"][0]["envFrom"] == [{"secretRef": {"name": "s3-keys"}}]


def test_a_train_job_and_its_runtime_have_the_fields_of_kubeflow_and_no_others(tmp_path: Path) -> None:
    runtime, job = written(tmp_path, "--name", "cifar", "--env", "A=b")
    labels = {"app.kubernetes.io/managed-by": "paceline"}
    head = {"apiVersion": "trainer.kubeflow.org/v1alpha1", "metadata": {"name": "cifar", "labels": labels}}
    command = job["spec"]["trainer"].pop("command")
    assert command[command.index("--rdzv") + 1] == "cifar-node-0-0.cifar:29400"
    limits = {"nvidia.com/gpu": "4", "cpu": "16", "memory": "67108864Ki"}
    trainer = {"numNodes": 2, "image": "paceline:1", "resourcesPerNode": {"limits": limits}}
    reference = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": "cifar"}
    spec: dict[str, Any] = {"runtimeRef": reference, "trainer": {**trainer, "env": [{"name": "A", "value": "b"}]}}
    assert job == {**head, "kind": "TrainJob", "spec": spec}
    (node,) = runtime["spec"]["template"]["spec"].pop("replicatedJobs")
    spec = {"mlPolicy": {"numNodes": 2, "torch": {}}, "template": {"spec": {}}}
    assert runtime == {**head, "kind": "TrainingRuntime", "spec": spec}
    template = node.pop("template")
    assert node == {"name": "node"}
    assert template["metadata"] == {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}}
    check_core({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "node"}, "spec": template["spec"]})


def test_names_of_existing_objects_may_be_long_and_contain_dots(tmp_path: Path) -> None:
    claim = "2026.data-of-a-team-with-a-very-long-name-and-many-images"
    _, job = written(tmp_path, "--plain", "--runs-claim", claim, "--secret", "s3.keys", "--namespace", "7-vision")
    check_core(job)
    claims = [volume.get("persistentVolumeClaim") for volume in job["spec"]["template"]["spec"]["volumes"]]
    assert {"claimName": claim} in claims and job["metadata"]["namespace"] == "7-vision"


def test_user_arguments_reach_the_container_unchanged(tmp_path: Path) -> None:
    service, job = written(tmp_path, "--plain", "--out", ODD, "--env", f"WORDS={ODD}", "--set", f"inception={ODD}")
    check_core(job)
    pod = job["spec"]["template"]["spec"]
    assert pod["containers"][0]["env"] == [{"name": "WORDS", "value": ODD.replace("$", "$$")}]
    assert words(pod)[words(pod).index("--out") + 1] == "/runs/d-e", "only the base name of --out is used"
    assert f"inception={ODD}" in words(pod)
    assert service["metadata"]["name"] == "d-e"


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--nnodes", "3"), "--nnodes 3: differs from --nodes 2; use only --nodes"),
        (("--devices", "3"), "--devices 3: differs from --gpus-per-node 4; use only --gpus-per-node"),
        (("--data-root", "/mnt/x"), "--data-root /mnt/x: not in /data, where --data-claim is mounted"),
        (("--set", "data_root=/mnt/x"), "--data-root /mnt/x: not in /data"),
    ],
)
def test_flags_that_contradict_the_job_are_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], complaint: str
) -> None:
    assert run([*COMMAND, *VOLUMES, "--to", str(tmp_path / "job.yaml"), *flags]) == 2
    assert complaint in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_settings_that_the_job_replaces_are_passed_once(tmp_path: Path) -> None:
    _, job = written(tmp_path, "--plain", "--name", "mine", "--set", "out=a/b", "--set", "data-root=/data/faces")
    command = words(job["spec"]["template"]["spec"])
    assert command[command.index("--out") + 1] == "/runs/mine" and job["metadata"]["name"] == "mine"
    assert command[command.index("--data-root") + 1] == "/data/faces"
    assert not [word for word in command if word.startswith(("out=", "data"))]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"name": "My Run"}, "--name 'My Run'"),
        ({"image": ""}, "--image"),
        ({"runs_claim": ""}, "--runs-claim"),
        ({"runs_claim": "../x"}, "--runs-claim '../x'"),
        ({"namespace": "a.b"}, "--namespace 'a.b'"),
        ({"memory": "lots"}, "--memory 'lots'"),
        ({"memory": "512ki"}, "--memory '512ki'"),
        ({"environment": ("no equals",)}, "--env no equals"),
        ({"environment": ("AWS_SECRET_ACCESS_KEY=x",)}, "--env AWS_SECRET_ACCESS_KEY: keep credentials in a Secret"),
        ({"environment": ("URL=https://me:pass@host/",)}, "--env URL: keep credentials in a Secret"),
        ({"secrets": ("a b",)}, "--secret 'a b'"),
    ],
)
def test_options_that_kubernetes_would_reject_are_rejected_before_submission(
    change: dict[str, Any], complaint: str
) -> None:
    whole = {"name": "run", "image": "paceline:1", "runs_claim": "runs"}
    KubernetesOptions(**whole).check()
    with pytest.raises(UserError) as error:
        KubernetesOptions(**(whole | change)).check()
    assert complaint in str(error.value) and "pass@" not in str(error.value)
