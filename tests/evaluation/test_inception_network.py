"""Our 2015 Inception network computes the same features as its TorchScript file, and accepts no other file."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from narrow_inception import file_network
from PIL import Image
from torch import Tensor, nn

from paceline.cli.app import run
from paceline.config.settings import RunSettings
from paceline.contracts.recipe import DataSpec
from paceline.core.errors import UserError
from paceline.core.gpu import float32_products
from paceline.data.source import ArraySource
from paceline.evaluation import features, inception
from paceline.evaluation.contract import Case
from paceline.evaluation.evaluators.generation import Generation
from paceline.evaluation.features import FeatureNetwork, Inception, Pixels
from paceline.runs.finished_run import open_run

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
CPU, GPU = torch.device("cpu"), torch.device("cuda")
no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class File(NamedTuple):
    """A narrow Inception network in a TorchScript file, and the original."""

    path: str
    digest: str
    network: nn.Module
    answer: tuple[float, ...]

    def load(self, patch: pytest.MonkeyPatch, device: torch.device = CPU) -> FeatureNetwork:
        """Accept the file as the genuine one, and load it."""
        patch.setattr(features, "ANSWER", self.answer)
        return features.load_inception(self.path, self.digest, device)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> File:
    torch.manual_seed(0)
    network, path = file_network(), tmp_path_factory.mktemp("file") / "narrow.pt"
    trial = inception.enlarged(inception.make_test_image(CPU))
    with float32_products(tf32=False), torch.no_grad():  # tracing fixes whether convolutions may use TF32
        torch.jit.trace(network, trial, check_trace=False).save(str(path))
        answer = network(trial)[0, :8]
    return File(str(path), sha256(path.read_bytes()).hexdigest(), network, tuple(answer.tolist()))


def some_images() -> Tensor:
    """Return smooth images and noise."""
    generator = torch.Generator().manual_seed(1)
    coarse = torch.randint(0, 256, (2, 3, 4, 4), generator=generator, dtype=torch.uint8)
    noise = torch.randint(0, 256, (2, 3, 32, 32), generator=generator, dtype=torch.uint8)
    return torch.cat([coarse.repeat_interleave(8, 2).repeat_interleave(8, 3), noise])


@pytest.mark.parametrize("device", [CPU, pytest.param(GPU, marks=[pytest.mark.gpu, no_gpu])], ids=str)
@torch.no_grad()
def test_our_network_computes_the_same_features_as_the_file_in_every_precision(file, monkeypatch, device):
    ours = file.load(monkeypatch, device)
    wanted = file.network(inception.enlarged(some_images()))
    assert wanted.shape == (4, 2048) and (wanted[0] - wanted[1]).abs().max() > 0.1, "images can be distinguished"
    on_gpu = {"tf32": 3e-3, "fp16": 2e-3}
    for arithmetic, within in {"fp32": 1e-5, **({"tf32": 1e-5} if device == CPU else on_gpu)}.items():
        found = ours(some_images().to(device), arithmetic).vectors.cpu()
        assert found.dtype == torch.float32 and found.isfinite().all()
        assert (found - wanted).abs().max() < within * wanted.max(), arithmetic


@pytest.mark.parametrize(
    "broken, reason",
    [
        (lambda network: lambda x: network(x) + 1, "they compute incorrect features"),
        (lambda network: lambda x: x / object(), "unsupported operand.*"),
    ],
)
@torch.no_grad()
def test_fp16_is_rejected_if_its_kernels_do_not_work(file, monkeypatch, broken, reason):
    pytest.importorskip("triton")
    ours = file.load(monkeypatch)
    monkeypatch.setattr("paceline.evaluation.inception_half.Half", broken)
    with pytest.raises(UserError, match=rf"kernels fail on this machine \({reason}\); use feature_precision=tf32"):
        ours(some_images(), "fp16")


def test_a_file_is_loaded_only_if_its_hash_is_known_or_given_and_it_is_the_inception_network(
    file, tmp_path, monkeypatch
):
    features.load_inception.cache_clear()  # an earlier test may have loaded the file
    text = tmp_path / "text.pt"
    text.write_text("not a network")
    other = tmp_path / "other.pt"
    torch.jit.script(nn.Linear(3, 2048)).save(str(other))
    cases = [
        (tmp_path / "none.pt", "", "no such file"),
        (file.path, "", f"not a known Inception file .*--inception-sha256 {file.digest}"),
        (file.path, "00ff", f"its SHA-256 is {file.digest}, but --inception-sha256 is 00ff"),
        (
            file.path,
            file.digest,
            r"not a TorchScript file of the 2015 Inception network \(it computes different features\)",
        ),
        (other, sha256(other.read_bytes()).hexdigest(), "not a TorchScript file of the 2015 Inception network"),
        (text, sha256(text.read_bytes()).hexdigest(), "not a TorchScript file of the 2015 Inception network"),
    ]
    for path, allowed, message in cases:
        with pytest.raises(UserError, match=message):
            features.load_inception(str(path), allowed, CPU)
    monkeypatch.setattr(features, "ANSWER", (0.0,))
    monkeypatch.setattr(features, "inception_network", lambda weights: lambda x: torch.zeros(1, 2048))
    assert features.load_inception(file.path, file.digest.upper(), CPU).protocol()["weights"] == file.digest


def test_fp16_needs_a_gpu_and_an_inception_file():
    network = Inception(nn.Sequential(), "")
    network.require("fp16", GPU)
    with pytest.raises(UserError, match=r"feature_precision=fp16: needs a GPU.* use feature_precision=fp32"):
        network.require("fp16", CPU)
    with pytest.raises(UserError, match="feature_precision=fp16: supported only if Inception is loaded from a file"):
        Pixels(DataSpec(3, 8, 8)).require("fp16", GPU)


def test_upscaling_by_two_matrices_equals_upscaling_pixel_by_pixel():
    images = torch.rand(2, 3, 5, 7) * 255
    enlarged = inception.resize_like_tensorflow(images, 12)
    for row, column in ((0, 0), (1, 11), (6, 5), (11, 3), (11, 11)):
        y, x = row * 5 / 12, column * 7 / 12
        top, left = int(y), int(x)
        bottom, right = min(top + 1, 4), min(left + 1, 6)
        upper = images[..., top, left] * (1 - x + left) + images[..., top, right] * (x - left)
        lower = images[..., bottom, left] * (1 - x + left) + images[..., bottom, right] * (x - left)
        wanted = upper * (1 - y + top) + lower * (y - top)
        assert torch.allclose(enlarged[..., row, column], wanted, rtol=1e-5, atol=1e-4)


def quick_distance(mean1: Tensor, covariance1: Tensor, mean2: Tensor, covariance2: Tensor) -> float:
    """Replace the Fréchet distance, which takes seconds to compute, with a fast comparison of the same statistics."""
    return ((mean1 - mean2).square().sum() + (covariance1 - covariance2).abs().sum()).item()


def test_measure_computes_the_same_fid_as_the_evaluator(
    file: File, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    for module in ("paceline.commands.measure", "paceline.evaluation.evaluators.generation"):
        monkeypatch.setattr(f"{module}.frechet_distance", quick_distance)
    file.load(monkeypatch)
    path, digest = file.path, file.digest
    real, made = torch.randint(256, (2, 4, 20, 24, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    for name, images in (("made", made), ("real", real)):
        Path(name).mkdir()
        for number, image in enumerate(images):
            Image.fromarray(image.numpy()).save(f"{name}/{number}.png")
    words = ["--inception", path, "--inception-sha256", digest, "--json", "measured.json"]
    assert run(["measure", "made", "real", *words]) == 0
    assert (
        "4 images (4 results, 4 targets): fewer images than features (2,048), so FID is unreliable"
        in capsys.readouterr().out
    )
    measured = json.loads(Path("measured.json").read_text())
    assert measured["protocol"]["weights"] == digest
    spec = DataSpec(3, 20, 24)
    settings = RunSettings(inception=path, inception_sha256=digest, few_images="allow")
    evaluator = Generation(Case(ArraySource({"image": real.numpy()}, spec), "test", 4, open_run), spec, CPU, settings)
    index = torch.arange(4)
    evaluator.update_samples({"image": real.permute(0, 3, 1, 2) / 127.5 - 1, "index": index})
    evaluator.end_samples(evaluator.sample_sums())
    evaluator.update({"image": made.permute(0, 3, 1, 2) / 127.5 - 1}, {"index": index})
    fid = evaluator.results(evaluator.sums())["FID"]
    assert fid > 0 and measured["metrics"]["FID"] == pytest.approx(fid, rel=1e-4)
    assert run(["measure", "made", "real", "--inception", "none.pt"]) == 2
    assert capsys.readouterr().err == "paceline: --inception none.pt: no such file\n"
