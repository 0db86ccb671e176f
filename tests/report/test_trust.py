"""Conclusions in a report: only runs with equal settings are compared, and noise is taken into account."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from paceline.contracts.step_ladder import MeasuredRung, StepLadder
from paceline.report.advice import explain, summarise
from paceline.report.build import make_report, write_report
from paceline.report.model import Cell, Explanation, Parity, Report, Run, SelectionMetric, Speed

HARDWARE = {"accelerator": "cpu", "cpu": "a CPU", "cores": "8", "gpus": "none", "torch": "2.15"}


def cell(
    strategy: str = "single",
    devices: int = 1,
    batch: int = 64,
    *,
    speed: float = 1000.0,
    spread: float | None = 1.0,
    top1: float | None = 90.0,
    test: float = 90.0,
    num_evaluated: int = 144,
    includes_warmup: bool = False,
    seed: int = 0,
    metric: str = "validation/top1",
    requested: str = "",
    gpu: dict[str, float] | None = None,
    hardware: dict[str, str] | None = None,
    **settings: str,
) -> Cell:
    """Return a finished run with the given measurements."""
    place = HARDWARE | (hardware or {})
    speeds = Speed(speed, speed, num_log_intervals=3, std_over_log_intervals=spread, includes_warmup=includes_warmup)
    name = f"{strategy}-{devices}-{batch}-{seed}-{'-'.join([*settings.values(), *(hardware or {}).values()])}"
    run = Run(
        folder=name,
        recipe="classification",
        data="digits",
        fingerprint="100 samples, abc",
        strategy=strategy,
        devices=devices,
        shares_a_gpu=False,
        batch=batch,
        seed=seed,
        precision=settings.get("precision", "fp32"),
        settings={"precision": "fp32", "nnodes": "1"} | settings,
        provenance=place,
        hardware=place,
        images=640,
        seconds=1.0,
        finished=True,
        best=(metric, "max"),
        quality={"test/top1": test},
        selection_metric=SelectionMetric(metric, top1, num_evaluated) if top1 is not None else None,
        speed=speeds,
        gpu=gpu or {},
        losses={},
        selection_curve=[],
        protocols={},
    )
    return Cell(name, "classification", strategy, devices, requested or str(batch), seed, "done", "", run)


def made(*cells: Cell, **more: Any) -> tuple[Report, str]:
    """Return a report and the text of its summary."""
    report = make_report("a title", cells, **more)
    return report, " ".join(summarise(report))


@pytest.mark.parametrize("turned", [False, True])
def test_the_speedup_is_relative_to_one_device_with_the_same_settings(turned: bool) -> None:
    cells = [
        cell(speed=1000, precision="fp32"),
        cell(speed=250, precision="fp64"),
        cell("ddp", 2, speed=500, precision="fp64"),
        cell("ddp", 2, speed=1500, precision="fp32"),
        cell("ddp", 2, speed=800, precision="bf16"),
    ]
    report, _ = made(*(cells[::-1] if turned else cells))
    speedups = {
        group.extras["precision"]: group.scaling and group.scaling.speedup
        for group in report.groups.values()
        if group.strategy == "ddp"
    }
    assert speedups == {"fp64": 2.0, "fp32": 1.5, "bf16": None}


def test_communication_settings_do_not_prevent_comparison_with_one_device() -> None:
    report, _ = made(cell(speed=1000), cell("ddp", 4, speed=2000, nnodes="2", compress="fp16"))
    alone, ddp = [group.scaling for group in report.groups.values()]
    assert alone is None and ddp is not None and ddp.speedup == 2.0


def test_runs_with_equal_batches_per_device_are_compared() -> None:
    cells = [cell(batch=b, speed=s, requested=f"{b}/device") for b, s in ((32, 1000), (64, 1100))]
    cells += [cell("ddp", 2, b * 2, speed=s, requested=f"{b}/device") for b, s in ((32, 1800), (64, 2090))]
    report, _ = made(*cells)
    found = [group.scaling for group in report.groups.values() if group.strategy == "ddp"]
    assert [(one.kind, one.speedup) for one in found if one] == [("weak", 1.8), ("weak", 1.9)]


def test_runs_with_different_hardware_or_torch_versions_are_not_averaged() -> None:
    cells = [cell(seed=0, speed=100, hardware={"torch": "2.11"}), cell(seed=1, speed=300)]
    cells += [cell("ddp", 2, speed=400), cell("ddp", 2, seed=1, hardware={"accelerator": "cuda", "gpus": "2 × GPU"})]
    report, _ = made(*cells)
    assert [group.n for group in report.groups.values()] == [1, 1, 1, 1]
    labels = [group.label for group in report.groups.values()]
    assert labels[0] == "single, accelerator=cpu, gpus=none, torch=2.11"
    assert labels[3] == "ddp × 2, accelerator=cuda, gpus=2 × GPU, torch=2.15"
    assert [bool(group.scaling) for group in report.groups.values()] == [False, False, True, False]
    assert "different hardware or torch versions (see the tables)" in report.subtitle


def test_a_slower_run_is_not_recommended_for_one_more_correct_image() -> None:
    report, printed = made(cell(batch=64, speed=1000, top1=100 * 131 / 144), cell(batch=128, speed=3000, top1=90.278))
    assert report.recommendation.group == "classification-single-1-128"
    assert "All 2 rows reach a validation top-1 of 90.28 to 90.97 %." in printed
    assert "A single seed cannot show" in printed and "worse" not in printed


def test_a_much_worse_run_with_one_seed_is_neither_recommended_nor_called_worse() -> None:
    report, printed = made(cell(batch=64, speed=1000, top1=90.0), cell(batch=128, speed=3000, top1=60.0))
    assert report.recommendation.group == "classification-single-1-64"
    assert "Behind the best: batch 128 by 30.00 points." in printed
    assert "A single seed cannot show" in printed and "worse" not in printed


def test_the_sampling_error_of_an_accuracy_depends_on_how_many_images_are_evaluated() -> None:
    def cells(num_evaluated: int) -> list[Cell]:
        tops = ((64, 91.0), (128, 90.3))
        return [
            cell(batch=b, seed=n, speed=b, top1=top1, num_evaluated=num_evaluated) for b, top1 in tops for n in (0, 1)
        ]

    few, printed = made(*cells(144))
    assert few.recommendation.group == "classification-single-1-128" and "A single seed" not in printed
    many, printed = made(*cells(1_000_000))
    assert many.recommendation.group == "classification-single-1-64"
    assert "Significantly worse, given the spread over seeds: batch 128 by 0.70 points" in printed


def test_the_test_split_is_never_used_for_recommendations() -> None:
    report, printed = made(cell(speed=1000, test=99.0), cell("ddp", 2, speed=1500, top1=None, test=10.0))
    assert report.recommendation.best is None
    assert "No recommendation based on quality: validation top-1 was not measured for ddp × 2." in printed
    assert "Based on speed alone, use **ddp × 2**" in printed


def test_the_sampling_error_is_estimated_only_for_accuracies() -> None:
    rows = [
        cell(batch=b, speed=b, top1=v, metric="validation/psnr", num_evaluated=4) for b, v in ((64, 30.0), (128, 28.0))
    ]
    assert made(*rows)[0].recommendation.group == "classification-single-1-64"


def test_if_speeds_differ_by_less_than_their_spread_the_simplest_strategy_is_recommended() -> None:
    rows = [cell("dp", 2, speed=1040, spread=50.0), cell("lightning", 1, speed=1030, spread=5.0)]
    rows += [cell("single", speed=1000, spread=5.0), cell("ddp", 2, speed=900, spread=5.0)]
    report, printed = made(*rows)
    advice = report.recommendation
    assert advice.group == "classification-single-1-64" and len(advice.tied) == 3
    assert "it is the simplest; as fast, given the spread of the speeds, are dp × 2, lightning." in printed


def test_speeds_with_an_unknown_spread_are_equal_if_they_differ_by_less_than_five_percent() -> None:
    seeds = [cell("ddp", 2, speed=s, spread=999.0, seed=n) for n, s in enumerate((1099, 1100, 1101))]
    seeds += [cell("single", speed=s, spread=999.0, seed=n) for n, s in enumerate((999, 1000, 1001))]
    assert made(*seeds)[0].recommendation.group == "classification-ddp-2-64"
    for speed, best in ((1040, "single-1"), (1200, "ddp-2")):
        report, _ = made(cell(speed=1000, spread=None), cell("ddp", 2, speed=speed, spread=None))
        assert report.recommendation.group == f"classification-{best}-64"


def ladder(*speeds: float, devices: int = 2, weak: bool = False) -> Explanation:
    names = ("one", "part", "together", "gradients", "batchnorm", "loading")
    return explain(measured(devices, **dict(zip(names, speeds, strict=False))), weak=weak)


def measured(devices: int = 2, **speeds: float) -> StepLadder:
    rungs = [MeasuredRung(name, speed, low=speed, high=speed, n=7) for name, speed in speeds.items()]
    return StepLadder(devices, 64, rungs, {"classifier": 1000})


def test_the_largest_scaling_cost_is_reported_with_the_possible_gain() -> None:
    found = ladder(500, 500, 100)
    assert found.largest_cost == "together" and found.gain == pytest.approx(0.01 / (0.01 - 0.008) - 1)
    found = ladder(100, 190, 180, 120, 100, 95)
    assert found.largest_cost == "gradients" and found.gain == pytest.approx(1 / (1 - 95 / 120 + 95 / 180) - 1)
    assert found.efficiency == pytest.approx(95 / 200)
    assert sum(rung.share or 0.0 for rung in found.rungs) == pytest.approx(1 - 95 / 200)


def test_noisy_measurements_do_not_predict_an_impossible_gain() -> None:
    found = ladder(500, 100, 200)
    assert found.largest_cost == "part" and found.gain == pytest.approx(4.0)
    assert ladder(100, 250).largest_cost is None


def test_with_a_fixed_batch_per_device_the_batch_size_is_not_a_scaling_cost() -> None:
    found = ladder(100, 120, 100, 90, weak=True)
    assert [rung.name for rung in found.rungs] == ["ideal", "together", "gradients"]
    assert found.efficiency == pytest.approx(90 / 120) and found.largest_cost == "together"
    ddp = cell("ddp", 2, 128, speed=280)
    report, printed = made(cell(speed=150), ddp, step_ladders={ddp.name: measured(one=500, part=300, gradients=290)})
    assert report.scaling_costs["classification-ddp-2-128"].weak and "gradients are exchanged" in printed


def test_the_report_states_where_each_efficiency_was_measured(tmp_path: Path) -> None:
    ddp, rungs = cell("ddp", 2, speed=440), measured(one=500, part=900, gradients=450)
    report, printed = made(cell(speed=1000), ddp, step_ladders={ddp.name: rungs})
    cost = "gradients are exchanged between devices"
    assert f"Speed relative to one device: ddp × 2 0.44× (largest cost: {cost})." in printed
    write_report(report, tmp_path)
    words = (tmp_path / "report.md").read_text()
    expected = "reaches 45 % of the ideal 2× speedup in this measurement (during the runs: 22 %; see Speed)."
    assert f"**ddp × 2** {expected}" in words and "Best remedy: a larger batch per device, --accumulate 2" in words


def test_the_recommended_run_is_called_the_fastest_only_among_runs_of_equal_quality() -> None:
    rows = [cell(speed=1000, top1=90.0), cell("ddp", 2, speed=800, top1=90.0)]
    rows += [cell(batch=128, speed=1900, top1=40.0), cell("ddp", 2, 128, speed=900, top1=40.0)]
    _, printed = made(*rows)
    assert "the fastest of those with equal quality" in printed and "“single, batch 128” by 50.00 points" in printed


@pytest.mark.parametrize("value", [math.nan, math.inf, 1.0])
def test_nan_or_large_differences_in_weights_are_reported(tmp_path: Path, value: float) -> None:
    difference = {"strategy": "ddp", "network": "n", "kind": "weights", "value": value, "tolerance": 0.1, "worst": "w"}
    parity = {"classification": Parity.from_json({"description": "5 steps", "differences": [difference]})}
    report, printed = made(cell(), cell("ddp", 2), parity=parity)
    assert "The strategies do **not** agree for classification" in printed
    write_report(report, tmp_path)
    text = (tmp_path / "report.json").read_text()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not valid JSON"))
    assert "does NOT produce the same weights" in (tmp_path / "report.md").read_text()


def test_a_strategy_file_named_in_a_run_is_never_executed_for_a_report(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    rows = [cell("elsewhere", speed=1040, spread=50.0), cell(str(own), 2, speed=1030, spread=50.0)]
    report, printed = made(*rows, cell("dp", 2, speed=1000, spread=50.0))
    assert report.recommendation.group == "classification-dp-2-64" and "it is the simplest" in printed
    assert not (tmp_path / "ran").exists()
    write_report(report, tmp_path)
    assert "elsewhere" in (tmp_path / "report.html").read_text()
