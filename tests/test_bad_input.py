"""A user error prints one line and exits with code 2, and intact checkpoints are kept."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from running import Running, run_fork, start_fork, start_ranks, weights_of

from paceline.cli.app import run
from paceline.commands.configure import configure
from paceline.config.settings import RunSettings
from paceline.core.errors import UserError
from paceline.data.source import open_sources
from paceline.parallel.world import check_devices

TINY = str(Path(__file__).parent / "tiny.py")
NO_GPU = not torch.cuda.is_available()


def assert_one_line(rejected: Running, *parts: str) -> None:
    assert_rejected(rejected.wait(), rejected.stdout, rejected.stderr, *parts)


def assert_rejected(code: int, output: str, errors: str, *parts: str) -> None:
    assert code == 2, output + errors
    assert len(errors.splitlines()) == 1, errors
    assert errors.startswith("paceline: ")
    assert "Traceback" not in output + errors
    for part in parts:
        assert part in errors, errors


USER_ERRORS: dict[str, str] = {  # expected part of the error line for each command
    "train classificaton": "unknown recipe 'classificaton'; did you mean 'classification'?",
    "train ./nothing.py": "recipe 'nothing.py': no such file",
    "train ./broken_recipe.py": "recipe 'broken_recipe.py': cannot be imported: SyntaxError",
    "train ./failing_recipe.py": "recipe 'failing_recipe.py': cannot be imported: ModuleNotFoundError",
    "train ./empty_recipe.py": "recipe './empty_recipe.py': defines no subclass of Recipe; add one",
    "train classification --strategy lightening": "unknown strategy 'lightening'; did you mean 'lightning'?",
    "train classification --strategy single --devices 2": "--strategy single: uses only 1 of 2 devices; use ddp",
    "train classification --loader residant": "unknown loader 'residant'; did you mean 'resident'?",
    "train classification --data cifar": "unknown source 'cifar'; did you mean 'cifar10'?",
    "train classification --data ./empty_recipe.py": "source './empty_recipe.py': defines no subclass of Source",
    "train classification --strategy ./nothing.py": "strategy 'nothing.py': no such file",
    "train classification --preset quik": "unknown preset 'quik'; did you mean 'quick'?",
    "train classification --set old_option=3": "unknown setting 'old_option'; `paceline settings classification` lists",
    "train classification --set batchsize=3": "--set: unknown setting 'batchsize'; did you mean 'batch_size'?",
    "train classification --set classifer.lr=1": "unknown network 'classifer'; did you mean 'classifier'?",
    "train classification --set classifier.epochs=1": "'epochs' applies to the whole run and cannot be set "
    "for network 'classifier' alone",
    "train classification --set lr": "--set lr: expected name=value",
    "train classification --set =3": "--set =3: expected name=value",
    "train classification --set recipe=dcgan": "--set recipe=dcgan: leave it out; the recipe is not a "
    "setting, but an argument, as in `paceline train dcgan`",
    "train classification --set lr=fast": "--set lr: 'fast' is not a number",
    "train classification --set optimizer=sdg": "unknown value 'sdg'; did you mean 'sgd'?",
    "train classification --set evaluate_every=off": "'50 steps' or '50%', or 'never'",
    "train classification --set evaluate_every=0epochs": "must be greater than 0; use 'never' to switch it off",
    "train classification --set save_every=never": "save_every='never': not supported; use '100%'",
    "train classification --set warmup=soon": "warmup='soon': expected a span like '5 epochs'",
    "train classification --set validation=1": "validation=1: must be at least 0 and below 1",
    "train classification --set validation=0.00001": "validation=1e-05: leaves a split empty "
    "(samples available: 1438); use --set validation=0.001 to hold out at least one sample, "
    "or --set validation=0 to hold out no samples",
    "train classification --set width=0": "width=0: must be at least 1",
    "train classification --accelerator cpu --set width=9999999999999": "recipe 'classification': the next layer "
    "needs 360,000.0 GB of memory, but",
    "train classification --lr -1": "--lr -1: must be at least 0",
    "train classification --epochs 0": "--epochs 0: must be above 0",
    "train classification --devices 0": "--devices 0: must be at least 1",
    "train classification --devices two": "devices: 'two' is not a whole number",
    "train classification --seed 9223372036854775808": "--seed 9223372036854775808: must be at least 0 and below 922",
    "train classification --lr 1e300": "--lr 1e+300: must be at least 0 and below 1e+38",
    "train classification --set channels=-9999999999999999999": "must be at least 0 and at most 64",
    "train classification --precision fp8": "unknown value 'fp8'",
    "train classification --batch-size many": "--batch-size 'many': expected a number like 128",
    "train classification --batch-size 99999999999999999999": "--batch-size 99999999999999999999: must be at most "
    "10,000,000 images",
    "train classification --accelerator cpu --devices 99999": "--devices 99999: must be at most 1,024 on a CPU",
    "train classification --batch-size 3 --accumulate 4": "--batch-size 3: needs at least 4 images (1 devices × 4",
    "train classification --gpus two": "--gpus",
    "train classification --config nothing.toml": "--config nothing.toml: no such file",
    "train classification --config broken.toml": "--config broken.toml: ",
    "train classification --config conflict.ini": "paceline: --config conflict.ini: seed is 1 in [a] and 2 in [b]",
    "train classification --config nameless.toml": "--config nameless.toml: unknown setting ''",
    "train classification --config typo.toml": "--config typo.toml: unknown setting 'epocs'; did you mean 'epochs'?",
    "train classification --data folder --data-root nowhere": "--data-root nowhere: no such folder",
    "train classification --data folder --data-root empty": "empty: has no images (supported: ",
    "train restoration --data digits --crop 8": "--data digits: its samples have no field 'target'; use a",
    "train super_resolution --data degraded": "--data degraded: its samples have a field 'target', which "
    "super_resolution would ignore; to use it, run: paceline train restoration",
    "train restoration --data pairs": "--data pairs: needs --data-root; pass the path to your data",
    "train classification --data folder": "--data folder: needs --data-root",
    "import a.pth --recipe dcgan --out a.safetensors": "--recipe dcgan: has no importer; recipes with an importer: ",
    "train classification --out a_file": "--out a_file: ",
    "train classification --name ../first": "--name ../first: must not be a path; use --out for a folder outside runs/",
    "train classification --out full": "--out full: the folder exists and is not a run (it contains diary.txt); "
    "choose a new or empty folder",
    "train classification --bogus": "No such option: --bogus (--help lists all options; for a recipe "
    "or source setting, use --set bogus=VALUE)",
    "train classification --warmup 5": "No such option: --warmup (use --set warmup=VALUE)",
    "train classification --learning-rate 1": "No such option: --learning-rate (use --lr)",
    "train ./lossless.py --preset quick": "unknown preset 'quick'; there are none",
    "train ./lossless.py": "recipe './lossless.py': phase 'classifier' needs a method classifier_loss(self, batch); "
    "found: clasifier_loss",
    "train ./netless.py": "recipe './netless.py': phase 'critic' refers to an unknown network 'critic'; "
    "choose from: network",
    "train ./phaseless.py": "recipe './phaseless.py': has no phases; define phases = (Phase(NAME, NETWORK),)",
    "plan dcgan --preset quick --devices 2 --mirror s3://x": "No such option: --mirror "
    "(not supported by plan; leave it out)",
    "plan dcgan --nnodes 3": "No such option: --nnodes (use --nodes)",
    "new recipe mine --kind gan": "No such option: --kind (--help lists all options)",
    "verify dcgan --precision bf16": "No such option: --precision (not supported by verify; leave it out)",
    "train": "Missing argument",
    "trian classification": "No such command 'trian'",
    "evaluate nowhere": "nowhere: no such file or folder",
    "verify classification --strategies single": "--strategies single: expected two or more different names",
    "verify classification --steps 0": "--steps 0: must be at least 1",
    "verify classification --accelerator cpu --strategies single,dp": "--strategies single,dp: DataParallel needs "
    "GPUs; on a CPU it is the same as single; leave dp out",
    "verify classification --strategies single,dpd": "unknown strategy 'dpd'",
    "verify classification --control nothing": "unknown control 'nothing'",
    f"compare {'x' * 300} dcgan": f"{'x' * 60}…: the path or one of its names is too long: use a shorter one",
    f"compare {'x/' * 3000}": "the path or one of its names is too long: use a shorter one",
}

RECIPE = """
from torch import nn
from paceline.contracts.recipe import Loss, Phase, Recipe

class Mine(Recipe):
    phases = {phases}

    def __init__(self, settings, spec):
        super().__init__(settings, spec)
        self.network = nn.Linear(1, 1)

    def {loss}(self, batch):
        return Loss({{}})
"""


@pytest.fixture(scope="module")
def bad_inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all kinds of unusable files."""
    folder = tmp_path_factory.mktemp("mistakes")
    (folder / "broken_recipe.py").write_text("class Recipe(:\n")
    (folder / "failing_recipe.py").write_text("import a_module_that_is_not_there\n")
    (folder / "empty_recipe.py").write_text("answer = 42\n")
    (folder / "broken.toml").write_text("epochs = \n")
    (folder / "broken.ini").write_text("epochs = 3\n")
    (folder / "conflict.ini").write_text("[a]\nseed = 1\n[b]\nseed = 2\n")
    (folder / "nameless.toml").write_text('"" = 1\n')
    (folder / "typo.toml").write_text("epocs = 3\n")
    (folder / "other_word.toml").write_text("learning_rate = 3\n")
    for name, phases, loss in (
        ("lossless", '(Phase("classifier", "network"),)', "clasifier_loss"),
        ("netless", '(Phase("critic", "critic"),)', "critic_loss"),
        ("phaseless", "()", "network_loss"),
    ):
        (folder / f"{name}.py").write_text(RECIPE.format(phases=phases, loss=loss))
    (folder / "full").mkdir()
    (folder / "full" / "diary.txt").write_text("")
    (folder / "a_file").write_text("")
    (folder / "empty").mkdir()
    for name in ("input", "target"):
        (folder / "pairs" / name).mkdir(parents=True)
        for number in range(20):
            Image.new("RGB", (100, 100), (number, 0, 0)).save(folder / "pairs" / name / f"{number}.png")
    return folder


@pytest.mark.parametrize("command", USER_ERRORS)
def test_a_user_error_is_reported_in_one_line(
    bad_inputs: Path, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(bad_inputs)
    code = run(command.split())
    assert_rejected(code, *capsys.readouterr(), USER_ERRORS[command])
    assert not (bad_inputs / "runs").exists(), "a rejected run left a folder"


@pytest.mark.parametrize("count", [2, 3, 5, 17, 999])
def test_the_validation_fraction_suggested_by_an_error_message_works(count: int, tmp_path: Path) -> None:
    arrays = {"x_train": np.zeros((count, 4, 4), np.uint8), "y_train": np.arange(count) % 2}
    np.savez(tmp_path / "few.npz", **arrays, x_test=arrays["x_train"], y_test=arrays["y_train"])
    flags = {"data": "npz", "data_root": str(tmp_path / "few.npz")}
    for share in ("0.0001", "0.9999"):
        with pytest.raises(UserError, match="leaves a split empty") as rejected:
            open_sources(configure("classification", flags, assignments=[f"validation={share}"]))
        named = str(rejected.value).partition("--set ")[2].split()[0]
        sources = open_sources(configure("classification", flags, assignments=[named]))
        assert len(sources["train"]) + len(sources["validation"]) == count and len(sources["validation"]) >= 1


@pytest.mark.skipif(not NO_GPU, reason="there are GPUs here")
def test_gpu_options_are_rejected_on_a_machine_without_gpus(tmp_path: Path) -> None:
    for flags in (("--gpus", "0"), ("--accelerator", "cuda")):
        assert_one_line(run_fork(tmp_path, "train", "classification", *flags), flags[0], "no CUDA device is visible")


def test_more_gpus_than_available_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    check_devices(RunSettings(devices=2))
    with pytest.raises(UserError, match=r"--devices 4: PyTorch sees only 2 GPUs \(IDs 0 to 1\)"):
        check_devices(RunSettings(devices=4))
    with pytest.raises(UserError, match="--gpus 1,2: PyTorch sees only 2 GPUs"):
        check_devices(RunSettings(devices=2, gpus="1,2"))
    with pytest.raises(UserError, match="use --backend gloo"):
        check_devices(RunSettings(devices=2, gpus="0,0", backend="nccl"))


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """A folder with images in two classes; one image is truncated."""
    for name in ("train/cat", "train/dog", "test/cat", "test/dog"):
        folder = tmp_path / "photos" / name
        folder.mkdir(parents=True)
        for number in range(8):
            pixels = np.random.default_rng(number).integers(0, 256, (16, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"{number}.png")
    bad = tmp_path / "photos" / "train" / "cat" / "3.png"
    bad.write_bytes(bad.read_bytes()[:100])
    return tmp_path / "photos"


def test_an_unreadable_image_is_reported_or_skipped_as_configured(tmp_path: Path, photos: Path) -> None:
    images = ("--data", "folder", "--data-root", str(photos), "--images", "32", "--set", "validation=0.2")
    command = ("train", TINY, *images)
    for loader in ("workers", "resident"):
        rejected = run_fork(tmp_path, *command, "--loader", loader, "--out", loader)
        assert_one_line(rejected, str(photos / "train" / "cat" / "3.png"), "unreadable image", "--bad-images skip")
    skipping = run_fork(tmp_path, *command, "--bad-images", "skip", "--out", "skipping")
    assert skipping.wait() == 0, skipping.stderr
    assert "left out 1 of 16 samples" in skipping.stdout and "cat/3.png" in skipping.stdout


def test_a_non_finite_loss_reports_its_step_and_keeps_the_last_good_checkpoint(tmp_path: Path) -> None:
    command = ("train", TINY, "--out", "run", "--set", "not_finite_at=8", "--set", "save_every=2 steps")
    rejected = run_fork(tmp_path, *command)
    assert_one_line(rejected, "loss 'cross_entropy' in phase 'classifier' is not finite at step 8 (128 images seen)")
    assert "the last checkpoint is at 128 images" in rejected.stderr
    assert rejected.stderr.endswith(  # the run is in fp32 already
        "A lower learning rate or --set clip=1 may help: add --init-from run --out run-2 --lr 0.005 to the command\n"
    )
    checkpoint = weights_of(tmp_path / "run", 128)
    assert all(torch.isfinite(tensor).all() for tensor in tensors_in(checkpoint["weights.safetensors"]))


def suggested_flags(message: str) -> list[str]:
    """Return the flags that an error message suggests after a divergence."""
    found = re.search(r"add (--.*) to the command", message)
    assert found, message
    return shlex.split(found[1])


def test_the_command_that_is_suggested_after_a_divergence_works(tmp_path: Path) -> None:
    command = ("train", TINY, "--out", "run", "--images", "192", "--set", "save_every=2 steps")
    rejected = run_fork(tmp_path, *command, "--set", "huge_at=8", "--set", "classifier.lr=0.2")
    assert_one_line(rejected, "the run has diverged")
    flags = suggested_flags(rejected.stderr)
    assert flags == ["--init-from", "run", "--out", "run-2", "--set", "classifier.lr=0.02"]
    done = run_fork(tmp_path, *command, "--set", "classifier.lr=0.2", *flags)
    assert done.wait() == 0, done.stderr
    assert "initialised from run at 128 images: classifier" in done.stdout


def test_before_the_first_checkpoint_the_suggested_command_starts_again_in_the_same_folder(tmp_path: Path) -> None:
    command = ("train", TINY, "--out", "run", "--images", "64")
    rejected = run_fork(tmp_path, *command, "--set", "huge_at=1")
    assert_one_line(rejected, "no checkpoint has been written yet")
    flags = suggested_flags(rejected.stderr)
    assert flags == ["--lr", "0.005"]
    done = run_fork(tmp_path, *command, *flags)
    assert done.wait() == 0, done.stderr


@pytest.mark.parametrize(
    "strategy", ["single", "ddp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("dp", "fsdp", "lightning"))]
)
def test_a_huge_loss_stops_the_run_and_reports_its_step_and_the_last_good_checkpoint(
    tmp_path: Path, strategy: str
) -> None:
    if strategy == "lightning":
        pytest.importorskip("lightning")
    command = ("train", TINY, "--out", "run", "--set", "huge_at=8", "--set", "save_every=2 steps")
    rejected = run_fork(tmp_path, *command, "--strategy", strategy, "--accelerator", "cpu")
    diverged = "the run has diverged (the magnitude of classifier/cross_entropy is 1e+12) at step 9 (144 images seen)"
    assert_one_line(rejected, diverged)
    assert "the last checkpoint is at 128 images" in rejected.stderr
    assert "A lower learning rate" in rejected.stderr


def test_non_finite_weights_are_not_saved_even_if_the_loss_was_finite(tmp_path: Path) -> None:
    command = ("train", TINY, "--out", "run", "--set", "bad_gradient_at=3", "--set", "save_every=1 steps")
    rejected = run_fork(tmp_path, *command)
    expected = "network 'classifier' has weights that are not finite"
    assert_one_line(rejected, expected, "the last checkpoint is at 48 images")
    weights = tensors_in(weights_of(tmp_path / "run")["weights.safetensors"])
    assert all(torch.isfinite(tensor).all() for tensor in weights)


def tensors_in(content: bytes) -> list[torch.Tensor]:
    import safetensors.torch

    return [tensor for tensor in safetensors.torch.load(content).values() if tensor.is_floating_point()]


def test_a_parameter_without_a_gradient_is_reported(tmp_path: Path) -> None:
    rejected = run_fork(tmp_path, "train", TINY, "--set", "unused=true", "--out", "run")
    assert_one_line(rejected, "computes no gradient for 2 parameters in 'classifier' (spare.weight, spare.bias)")


def test_a_user_error_in_a_run_with_two_processes_is_printed_once_and_not_retried(tmp_path: Path, photos: Path) -> None:
    command = ("train", TINY, "--devices", "2", "--set", "save_every=2 steps")
    images = ("--data", "folder", "--data-root", str(photos), "--loader", "workers", "--batch-size", "2")
    of_all = start_fork(tmp_path, *command, "--max-restarts", "3", "--set", "not_finite_at=4", "--out", "loss")
    # Only one of the two ranks reads the damaged image. The other rank must print nothing.
    of_one = start_fork(tmp_path, *command, *images, "--images", "64", "--set", "validation=0", "--out", "images")
    assert_one_line(of_all, "loss 'cross_entropy' in phase 'classifier' is not finite at step 4 (64 images seen)")
    assert "the last checkpoint is at 64 images" in of_all.stderr
    assert_one_line(of_one, "train/cat/3.png", "unreadable image")


def test_a_network_interface_that_does_not_exist_is_reported_in_one_line(tmp_path: Path) -> None:
    command = ("train", TINY, "--devices", "2", "--accelerator", "cpu", "--out", "run")
    rejected = run_fork(tmp_path, *command, environment={"GLOO_SOCKET_IFNAME": "nope0"})
    assert_one_line(rejected, "GLOO_SOCKET_IFNAME=nope0: no such network interface; choose from: lo")


def test_nccl_on_a_cpu_is_reported_in_one_line(tmp_path: Path) -> None:
    command = ("train", TINY, "--strategy", "ddp", "--accelerator", "cpu", "--backend", "nccl", "--out", "run")
    assert_one_line(run_fork(tmp_path, *command), "--backend nccl: needs GPUs, and this run uses the CPU")


def test_processes_started_by_another_launcher_print_their_user_errors(tmp_path: Path) -> None:
    for flags, expected in (
        (("--strategy", "single"), "--strategy single: needs 1 process, but 2 were started; use ddp or lightning"),
        (("--devices", "2", "--batch-size", "1"), "--batch-size 1: needs at least 2 images (2 devices × 1"),
    ):
        for rank in start_ranks(tmp_path, 2, "train", TINY, *flags, "--out", "run"):
            assert_one_line(rank, expected)
    first, second = start_ranks(tmp_path, 2, "train", TINY, "--devices", "2", "--set", "unused=true", "--out", "run")
    expected = "computes no gradient for 2 parameters in 'classifier' (spare.weight, spare.bias)"
    assert_one_line(first, expected)
    assert second.wait() == 2 and expected in (tmp_path / "run" / "logs" / "rank-1.txt").read_text()
