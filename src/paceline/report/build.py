"""From cells and measurements to report.json, report.md and report.html."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paceline.report.losses import communication_share, explain
from paceline.report.markdown import to_markdown
from paceline.report.numbers import Cell, make_groups, recommend
from paceline.report.page import to_html
from paceline.report.phrases import fill
from paceline.report.plots import plot_names
from paceline.report.runs import Run
from paceline.report.words import summarise

Report = dict[str, Any]
CEILINGS_NOTE = (
    "Medians of interleaved blocks of steps, measured apart from the runs in the same number of processes: one device "
    "alone with the whole batch, alone with its part, all at once without communication, then with each part added. "
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
    """All numbers and words of a report; `ceilings` are by the name of a group."""
    groups = make_groups(cells)
    runs = [cell.run for cell in cells if cell.run is not None and cell.state == "done"]
    name, end = runs[0].best if runs else ("", "max")
    ceilings = {key: one for key, one in (ceilings or {}).items() if key in groups}
    report: Report = {
        "title": title,
        "subtitle": _subtitle(cells, runs),
        "command": command,
        "metric": {"name": _full_name(runs, name), "shown": _shown_metric(groups, name), "end": end},
        "groups": groups,
        "cells": [{k: v for k, v in asdict(cell).items() if k != "run"} for cell in cells],
        "counts": {"wanted": len(cells), "done": len(runs), "left": len(cells) - len(runs)},
        "runs": {run.folder: _kept_of(run) for run in runs},
        "recommendation": None,
        "ceilings": dict(ceilings),
        "why_not": {key: explain(one) for key, one in ceilings.items()},
        "why_not_note": CEILINGS_NOTE,
        "parity": dict(parity or {}),
        "samples": _samples(groups, runs),
        "made_with": _made_with(runs),
        "settings": _alike(runs),
    }
    report["recommendation"] = recommend(groups, report["metric"]["shown"], end)
    report["best_by_choice"] = _best_by_choice(groups, end)
    report["time"], report["time_note"], more = _time(groups, ceilings, runs)
    report["not_measured"] = [*not_measured, *more]
    report["plots"] = plot_names(report)
    report["summary"] = summarise(report)
    return report


def write_report(report: Report, folder: Path) -> Path:
    """Writes the three files and gives the page's path; report.json has the summary's phrases filled in."""
    folder.mkdir(parents=True, exist_ok=True)
    spoken = report | {"summary": [fill(phrase, report) for phrase in report["summary"]]}
    texts = {
        "report.json": json.dumps(spoken, indent=1, ensure_ascii=False) + "\n",
        "report.md": to_markdown(report),
        "report.html": to_html(report),
    }
    for name, text in texts.items():
        beside = folder / f".{name}.partial"
        beside.write_text(text)
        os.replace(beside, folder / name)
    return folder / "report.html"


def _subtitle(cells: Sequence[Cell], runs: Sequence[Run]) -> list[str]:
    facts = []
    if runs:
        made = runs[0].made_with
        seeds = sorted({run.seed for run in runs})
        facts.append(f"data {runs[0].data} ({runs[0].fingerprint.rpartition(', ')[0]} for training)")
        facts.append(f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}")
        facts.append(made.get("gpus") or f"{made.get('cpu', 'CPU')}, {made.get('cores', '?')} cores")
        facts.append(f"torch {made.get('torch', '?')}")
        facts.append(made.get("started", "")[:10])
    facts.append(f"{len(runs)} of {len(cells)} runs")
    return [fact for fact in facts if fact]


def _full_name(runs: Sequence[Run], name: str) -> str:
    return next((run.chosen_by["name"] for run in runs if run.chosen_by), name)


def _shown_metric(groups: Mapping[str, dict[str, Any]], name: str) -> str:
    """The metric to recommend by: on the test split where there is one, else the one that chooses."""
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
    }


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
        row |= {"evaluation": seconds["evaluation"], "saving": seconds["saving"]}
        split[key] = row | {"total": sum(row.values())}
    note = "Data wait, step, evaluation and saving are the host's clock in the runs. "
    note += "Communication is the share of a step that the ceilings show, compute the rest."
    copies = "copies run beside the step" if on_gpu else "on a CPU there is no copy to make"
    missing.append(f"host-to-device time inside a run ({copies})")
    if not on_gpu:
        missing.append("GPU utilisation, memory and energy (no GPU was used, or NVML did not answer)")
    return split, note, missing
