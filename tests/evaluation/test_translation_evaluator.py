import numpy as np
import pytest
import torch
from no_run import no_run

from paceline.config.settings import RunSettings
from paceline.contracts.recipe import DataSpec
from paceline.core.errors import UserError
from paceline.data.source import ArraySource
from paceline.evaluation.contract import Case
from paceline.evaluation.evaluators.translation import Translation
from paceline.evaluation.image_metrics import CLASSES, members

CPU = torch.device("cpu")
DATA_SPEC = DataSpec(channels=3, height=16, width=16, panels=("stain", "segmentation"))
COLOURS = torch.tensor([[-1, -1, -1], [1, -1, -1], [-1, 1, -1], [-1, -1, 1], [1, 1, 1]]).double()


def paint(labels: torch.Tensor) -> torch.Tensor:
    return COLOURS[labels].permute(0, 3, 1, 2)


def make_case(count: int = 5) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    made, real = torch.randint(5, (2, count, 16, 16), generator=generator)
    images = torch.rand(2, count, 3, 16, 16, generator=generator).double() * 2 - 1
    prediction = {"stain": images[0], "segmentation": paint(made)}
    return prediction, {"image": images[0], "stain": images[1], "segmentation": paint(real)}, made, real


def make_evaluator(spec: DataSpec = DATA_SPEC) -> Translation:
    source = ArraySource({"image": np.zeros((1, 16, 16, 3), np.uint8)}, spec)
    return Translation(Case(source, "test", len(source), no_run), spec, CPU, RunSettings())


def sums_of(sizes: list[int], spec: DataSpec = DATA_SPEC) -> torch.Tensor:
    prediction, batch, *_ = make_case(sum(sizes))
    evaluator = make_evaluator(spec)
    start = 0
    for size in sizes:
        part = slice(start, start + size)
        evaluator.update({k: v[part] for k, v in prediction.items()}, {k: v[part] for k, v in batch.items()})
        start += size
    return evaluator.sums()


def results(sums: torch.Tensor) -> dict[str, float]:
    return make_evaluator().results(sums)


def test_iou_and_dice_are_computed_over_the_pixels_of_all_images():
    *_, made, real = make_case()
    values = results(sums_of([5]))
    ious = []
    for label, name in ((1, "red"), (2, "green"), (3, "blue"), (4, "bright")):
        one, other = made == label, real == label
        both, either = (one & other).sum().item(), (one | other).sum().item()
        ious.append(both / either)
        assert values[f"iou_{name}"] == pytest.approx(both / either, rel=1e-12)
        assert values[f"dice_{name}"] == pytest.approx(2 * both / (one.sum() + other.sum()).item(), rel=1e-12)
    assert values["iou"] == pytest.approx(sum(ious) / 4) and values["count"] == 5


def test_psnr_of_each_panel_equals_torchmetrics_and_the_total_is_the_mean_over_panels():
    from torchmetrics.functional.image import peak_signal_noise_ratio

    prediction, batch, *_ = make_case()
    values = results(sums_of([5]))
    for name in DATA_SPEC.panels:
        levels = [((images[name] + 1) * 127.5).round() for images in (prediction, batch)]
        each = [peak_signal_noise_ratio(*pair, data_range=255.0).item() for pair in zip(*levels, strict=True)]
        assert values[f"{name}_psnr"] == pytest.approx(sum(each) / 5, rel=1e-5)
    assert values["psnr"] == pytest.approx((values["stain_psnr"] + values["segmentation_psnr"]) / 2)


def test_the_metrics_do_not_depend_on_how_samples_are_batched():
    whole, parts = sums_of([5]), sums_of([1, 3, 1])
    torch.testing.assert_close(whole, parts, rtol=1e-13, atol=0)
    assert torch.equal(whole[-12:], parts[-12:])  # the last 12 sums are pixel counts, which are exact


def test_a_perfect_segmentation_has_an_iou_and_dice_of_one():
    evaluator = make_evaluator()
    mask = torch.full((1, 3, 16, 16), -1.0).double()
    mask[..., :8] = 1
    evaluator.update({"segmentation": 0.8 * mask}, {"segmentation": mask})
    values = evaluator.results(evaluator.sums())
    assert (values["iou"], values["dice"]) == (1, 1)
    assert not any(name.startswith("iou_") or name.startswith("stain") for name in values)


def test_a_panel_smaller_than_the_ssim_window_is_rejected():
    small = {"stain": torch.zeros(1, 3, 8, 16)}
    with pytest.raises(UserError, match="images of 16×8 pixels are too small to compare"):
        make_evaluator().update(small, small)


def test_a_pixel_belongs_to_the_class_of_its_brightest_channel_or_to_none():
    levels = torch.tensor([[[[200, 90, 0, 255, 140]], [[50, 90, 255, 240, 20]], [[190, 90, 0, 230, 130]]]]).double()
    found = members(levels)[:, 0, 0]
    names = ["".join(name for name, one in zip(CLASSES, column, strict=True) if one) for column in found.T]
    assert names == ["red", "", "green", "bright", "red"]
