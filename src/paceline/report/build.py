"""From cells and measurements to report.json, report.md and report.html."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paceline.report.advice import recommend
from paceline.report.losses import communication_share, explain
from paceline.report.markdown import to_markdown
from paceline.report.numbers import Cell, make_groups
from paceline.report.page import to_html
from paceline.report.phrases import fill
from paceline.report.plots import plot_names
from paceline.report.runs import Run
from paceline.report.words import summarise
from paceline.runs.metrics import METRICS

Report = dict[str, Any]
CEILINGS_NOTE = (
    "Medians of interleaved blocks of steps, measured apart from the runs in the same number of processes: one device "
    "alone with the whole batch, alone with its part, all at once without communication, then with each part added. "
    "Shares are of the time that an image takes in the last line; a line slower than a later one is so by chance. "
    "The runs themselves were other processes at another time: their speed can differ from the last line."
)


def make_report(
    title: str,
    cells: Sequence[Cell],
    *,
    command: str = "",
    ceilings: Mapping[str, dict[str, Any]] | None = None,
    parity: Mapping[str, dict[str, Any]] | None = None,
    not_measured: Sequence[str] = (),
) -> Report:
    """All numbers and words of a report; `ceilings` are by the name of a group, without what else sets it apart."""
    groups = make_groups(cells)
    runs = [cell.run for cell in cells if cell.run is not None and cell.state == "done"]
    name, end = runs[0].best if runs else ("", "max")
    ceilings, unplaced = _by_group(ceilings or {}, groups)
    report: Report = {
        "title": title,
        "subtitle": _subtitle(cells, runs),
        "command": command,
        "metric": {"name": _full_name(runs, name), "shown": _shown_metric(groups, name), "end": end},
        "groups": groups,
        "cells": [{k: v for k, v in asdict(cell).items() if k != "run"} for cell in cells],
        "counts": {"wanted": len(cells), "done": len(runs), "left": len(cells) - len(runs)},
        "runs": {run.folder: _kept_of(run) for run in runs},
        "went_on": [{"run": run.folder, "at": run.went_on} for run in runs if run.went_on],
        "recommendation": None,
        "ceilings": dict(ceilings),
        "why_not": {key: explain(one, weak=_is_weak(groups[key])) for key, one in ceilings.items()},
        "why_not_note": CEILINGS_NOTE,
        "parity": {recipe: _finite(one) for recipe, one in (parity or {}).items()},
        "samples": _samples(groups, runs),
        "made_with": _made_with(runs),
        "settings": _alike(runs),
    }
    report["recommendation"] = recommend(groups, report["metric"]["name"], end)
    report["best_by_choice"] = _best_by_choice(groups, end)
    report["time"], report["time_note"], more = _time(groups, ceilings, runs)
    report["not_measured"] = [*not_measured, *unplaced, *more, *_broken(runs)]
    report["plots"] = plot_names(report)
    report["summary"] = summarise(report)
    return report


def write_report(report: Report, folder: Path) -> Path:
    """Writes the three files and gives the page's path; report.json has the summary's phrases filled in."""
    folder.mkdir(parents=True, exist_ok=True)
    spoken = report | {"summary": [fill(phrase, report) for phrase in report["summary"]]}
    texts = {
        "report.json": json.dumps(spoken, indent=1, ensure_ascii=False) + "\n",
        "report.md": to_markdown(report, folder),
        "report.html": to_html(report),
    }
    for name, text in texts.items():
        beside = folder / f".{name}.partial"
        beside.write_text(text)
        os.replace(beside, folder / name)
    return folder / "report.html"


def _by_group(
    ceilings: Mapping[str, dict[str, Any]], groups: Mapping[str, dict[str, Any]]
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """The ceilings by group, and which were measured for a name that several groups share."""
    placed, unplaced = {}, []
    for name, one in ceilings.items():
        meant = [key for key, group in groups.items() if group["measured_as"] == name]
        if len(meant) == 1:
            placed[meant[0]] = one
        elif meant:
            labels = ", ".join(groups[key]["label"] for key in meant)
            unplaced.append(f"ceilings of {labels} each (one measurement was made for all of them)")
    return placed, unplaced


def _is_weak(group: Mapping[str, Any]) -> bool:
    return bool(group["scaling"]) and group["scaling"]["kind"] == "weak"


def _finite(parity: Mapping[str, Any]) -> dict[str, Any]:
    """A parity table whose differences that are not finite are None, since JSON has no NaN."""

    def value(one: float | None) -> float | None:
        return one if one is not None and math.isfinite(one) else None

    return {**parity, "differences": [{**d, "value": value(d["value"])} for d in parity["differences"]]}


def _broken(runs: Sequence[Run]) -> list[str]:
    return [
        f"{run.broken_lines} broken line{'s' if run.broken_lines > 1 else ''} of {run.folder}/{METRICS} (left out)"
        for run in runs
        if run.broken_lines
    ]


def _subtitle(cells: Sequence[Cell], runs: Sequence[Run]) -> list[str]:
    facts = []
    if runs:
        made = runs[0].made_with
        seeds = sorted({run.seed for run in runs})
        samples = runs[0].fingerprint.rpartition(", ")[0]
        facts.append(f"data {runs[0].data}" + (f" ({samples} for training)" if samples else ""))
        facts.append(f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}")
        facts += _hardware(runs) if made else ["versions and hardware unknown"]
        facts.append(made.get("started", "")[:10])
    facts.append(f"{len(runs)} of {len(cells)} runs")
    return [fact for fact in facts if fact]


def _hardware(runs: Sequence[Run]) -> list[str]:
    """Where the runs were made; of several places, that they are several."""
    first = runs[0].hardware
    if any(run.hardware != first for run in runs):
        return ["different hardware or torch, see the rows"]
    where = first["gpus"] if first["accelerator"] == "cuda" else f"{first['cpu']}, {first['cores']} cores"
    return [where, f"torch {first['torch']}"]


def _full_name(runs: Sequence[Run], name: str) -> str:
    return next((run.chosen_by["name"] for run in runs if run.chosen_by), name)


def _shown_metric(groups: Mapping[str, dict[str, Any]], name: str) -> str:
    """The metric to show with the one that chooses: the same on the test split where there is one."""
    names = [metric for group in groups.values() for metric in group["quality"]]
    plain = name.partition("/")[2]
    return next((m for m in names if m.partition("/")[2].partition("[")[0] == plain), name)


def _best_by_choice(groups: Mapping[str, dict[str, Any]], end: str) -> str | None:
    judged = [group for group in groups.values() if group["chosen_by"]]
    choose = max if end == "max" else min
    return choose(judged, key=lambda g: g["chosen_by"]["mean"])["id"] if judged else None


def _kept_of(run: Run) -> dict[str, Any]:
    names = ("recipe", "strategy", "devices", "batch", "seed", "precision", "images", "seconds", "quality", "chosen_by")
    kept = asdict(run)
    return {
        n: kept[n] for n in (*names, "speed", "seconds_per_epoch", "gpu", "losses", "course", "protocols", "made_with")
    } | {"broken_lines": run.broken_lines, "went_on": run.went_on}


def _samples(groups: Mapping[str, dict[str, Any]], runs: Sequence[Run]) -> list[dict[str, str]]:
    by_folder = {run.folder: run for run in runs}
    found = []
    for group in groups.values():
        first = by_folder[group["runs"][0]]
        if first.samples:
            found.append({"caption": f"{group['label']}, seed {first.seed}", "path": first.samples})
    return found


def _made_with(runs: Sequence[Run]) -> dict[str, str]:
    """Versions and hardware; what differs between runs is said with all its values."""
    names = dict.fromkeys(name for run in runs for name in run.made_with)
    values = {name: list(dict.fromkeys(str(run.made_with.get(name, "none")) for run in runs)) for name in names}
    return {
        name: found[0] if name == "started" or len(found) == 1 else " | ".join(found) for name, found in values.items()
    }


def _alike(runs: Sequence[Run]) -> dict[str, Any]:
    names = dict.fromkeys(name for run in runs for name in run.settings)
    return {
        name: runs[0].settings[name]
        for name in names
        if all(name in run.settings and run.settings[name] == runs[0].settings[name] for run in runs)
    }


def _time(
    groups: Mapping[str, dict[str, Any]], ceilings: Mapping[str, dict[str, Any]], runs: Sequence[Run]
) -> tuple[dict[str, dict[str, float]], str, list[str]]:
    """An epoch's seconds by group, how they were split, and what could not be."""
    split: dict[str, dict[str, float]] = {}
    missing = []
    on_gpu = any("gpus" in run.made_with and run.gpu for run in runs)
    for key, group in groups.items():
        seconds = group["seconds_per_epoch"]
        if not seconds:
            continue
        row = {"data": seconds["data"]}
        share = communication_share(ceilings[key]) if key in ceilings else None
        if group["devices"] == 1:
            row["compute"] = seconds["step"]
        elif share is not None:
            row |= {"compute": seconds["step"] * (1 - share), "communication": seconds["step"] * share}
        else:
            row["step"] = seconds["step"]
            missing.append(f"communication of {group['label']} apart from compute (no ceilings were measured for it)")
        row |= {name: seconds[name] for name in ("between", "evaluation", "saving") if name in seconds}
        split[key] = row | {"total": sum(row.values())}
    note = "Data wait, step, evaluation and saving are the host's clock in the runs. "
    note += "Communication is the share of a step that the ceilings show, compute the rest. "
    note += "Between steps is what the loop around them takes, a Trainer's for one. "
    note += "What is saved or sampled after a run's last log line is in no line, and so not here."
    copies = "copies run beside the step" if on_gpu else "on a CPU there is no copy to make"
    missing.append(f"host-to-device time inside a run ({copies})")
    if not on_gpu:
        missing.append("GPU utilisation, memory and energy (no GPU was used, or NVML did not answer)")
    return split, note, missing
