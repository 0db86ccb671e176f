"""The sections about speed: how fast, where the time goes, what it loses on several devices, and what GPUs say."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from paceline.report.losses import STEPS
from paceline.report.metric_words import with_spread
from paceline.report.parts import Pictures, Plots, Section, Table
from paceline.report.phrases import NOTHING, at, listed

Report = dict[str, Any]
BEYOND = 1.1  # an efficiency that more devices alone do not explain
SPLIT_WORDS = {
    "data": "data wait",
    "host_to_device": "host to device",
    "compute": "compute",
    "communication": "communication",
    "step": "step, not split",
    "between": "between steps",
    "evaluation": "evaluation",
    "saving": "samples and saving",
}


def speed_section(report: Report) -> Section:
    head = ["strategy", "images/s", "without loading", "seconds a run", "× one device", "efficiency"]
    rows: list[list[str]] = []
    strong: set[int] = set()
    groups = report["groups"]
    for key, group in groups.items():
        if not group["images_per_second"]:
            continue
        if report["recommendation"] and key == report["recommendation"]["group"]:
            strong.add(len(rows))
        scaling = group["scaling"]
        where = ("groups", key)
        rows.append(
            [
                group["label"],
                with_spread(",.0f", group["images_per_second"], *where, "images_per_second"),
                with_spread(
                    ",.0f", group["images_per_second_without_loading"], *where, "images_per_second_without_loading"
                ),
                with_spread(".1f", group["seconds"], *where, "seconds"),
                at(".2f", *where, "scaling", "speedup") if scaling else NOTHING,
                at(".0%", *where, "scaling", "efficiency") if scaling else NOTHING,
            ]
        )
    if not rows:
        return Section("Speed", [])
    note = (
        "Images per second of training alone, over all devices, after the first logged stretch since a start (warm-up)"
    )
    note += "; ± is over seeds. Seconds a run has evaluation and saving in it, and no start-up."
    if unsettled := _labels(group for group in groups.values() if group["with_warm_up"]):
        note += f" {unsettled}: a run has one logged stretch, so its warm-up is in its speed and the time between steps"
        note += " is not."
    kinds = {group["scaling"]["kind"] for group in groups.values() if group["scaling"]}
    if kinds:
        same = " and ".join(
            "the same global batch" if k == "strong" else "the same batch per device" for k in sorted(kinds)
        )
        note += f" × one device: against single with {same}."
    if any(group["shares_a_gpu"] for group in groups.values()):
        note += " Rows “on one GPU” put several processes on one device: they show equality, not speed."
    note += _warnings(groups)
    plots = [name for name in ("speed", "scaling") if name in report["plots"]]
    return Section("Speed", [Table(head, rows, strong, note), *([Plots(plots)] if plots else [])])


def _labels(groups: Iterable[dict[str, Any]]) -> str:
    return listed(group["label"] for group in groups)


def _warnings(groups: dict[str, dict[str, Any]]) -> str:
    """What makes speeds mean something else than they seem to."""
    said = ""
    if beyond := _labels(g for g in groups.values() if is_beyond(g)):
        said += (
            f" Efficiency over 110 % ({beyond}): one device was slowed by something else, or its part fits the cache."
        )
    if crowded := _labels(g for g in groups.values() if g["more_processes_than_cores"]):
        said += f" {crowded}: more processes than cores, which took turns."
    return said


def is_beyond(group: dict[str, Any]) -> bool:
    """Whether a group is faster than so many devices can be."""
    return bool(group["scaling"]) and group["scaling"]["efficiency"] > BEYOND


def time_section(report: Report) -> Section:
    split = report["time"]
    columns = [name for name in SPLIT_WORDS if any(name in row for row in split.values())]
    if not columns:
        return Section("Where an epoch's time goes", [])
    rows = [
        [report["groups"][key]["label"]]
        + [at(".3f", "time", key, name) if row.get(name) is not None else NOTHING for name in columns]
        for key, row in split.items()
    ]
    parts: list[str | Table | Plots | Pictures] = []
    if "time" in report["plots"]:
        parts.append(Plots(["time"]))
    parts.append(Table(["seconds an epoch", *(SPLIT_WORDS[name] for name in columns)], rows, note=report["time_note"]))
    return Section("Where an epoch's time goes", parts)


def why_not_section(report: Report) -> Section:
    parts: list[str | Table | Plots | Pictures] = []
    for key, ladder in report["why_not"].items():
        label = report["groups"][key]["label"]
        where = ("why_not", key)
        if ladder["largest"]:
            number = next(i for i, rung in enumerate(ladder["rungs"]) if rung["name"] == ladder["largest"])
            cause, fix = STEPS[ladder["largest"]]
            parts.append(
                f"**{label}** reaches {at('.0%', *where, 'efficiency')} of {at('d', *where, 'devices')}× in this "
                f"measurement{_in_runs(report, key)}. "
                f"What takes most, {at('.0%', *where, 'rungs', number, 'share')} of its time: {cause}. "
                f"What would pay most: {fix}; without this alone, {at('+.0%', *where, 'gain')} images per second."
            )
        else:
            parts.append(f"**{label}** loses nothing that could be measured.")
        rows = []
        for number, rung in enumerate(ladder["rungs"]):
            what = STEPS[rung["name"]][0] if rung["name"] in STEPS else f"{ladder['devices']} × one device alone"
            what += ", each with its part" if rung["name"] == "ideal" and ladder["weak"] else ""
            share = at(".1%", *where, "rungs", number, "share") if "share" in rung else NOTHING
            rows.append([what, at(",.0f", *where, "rungs", number, "images_per_second"), share])
        parts.append(Table(["step by step", "images/s", "share of the time"], rows, note=report["why_not_note"]))
    return Section("Why not N×?", parts)


def _in_runs(report: Report, key: str) -> str:
    """The efficiency that the table of speeds has for the same row, where it has one."""
    if not report["groups"][key]["scaling"]:
        return ""
    return f" (in the runs: {at('.0%', 'groups', key, 'scaling', 'efficiency')}, see Speed)"


def gpu_section(report: Report) -> Section:
    heads = {
        "utilisation": ("utilisation, %", ".0f"),
        "peak_memory_gib": ("peak memory, GiB", ".2f"),
        "power_watts": ("power, W", ".0f"),
        "joules_per_1000_images": ("energy, J per 1,000 images", ".1f"),
    }
    with_gpu = {key: group for key, group in report["groups"].items() if group["gpu"]}
    columns = [name for name in heads if any(name in group["gpu"] for group in with_gpu.values())]
    if not columns:
        return Section("GPU", [])
    rows = [
        [group["label"]] + [at(heads[n][1], "groups", key, "gpu", n) if n in group["gpu"] else NOTHING for n in columns]
        for key, group in with_gpu.items()
    ]
    note = "As NVML says for the first process's GPU: means over the readings at each log, the peak of torch's memory. "
    note += "Energy is that GPU's times the number of GPUs, which takes them to be alike."
    return Section("GPU", [Table(["strategy", *(heads[name][0] for name in columns)], rows, note=note)])
