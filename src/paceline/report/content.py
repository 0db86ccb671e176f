"""What a report says, section by section, for a page and for Markdown alike. Its numbers are places in report.json."""

from __future__ import annotations

from typing import Any

from paceline.report.content_speed import gpu_section, speed_section, time_section, why_not_section
from paceline.report.metric_words import digits_for, metric_said, metric_words, quality_of, with_spread
from paceline.report.parts import Pictures, Plots, Section, Table
from paceline.report.phrases import NOTHING, at

Report = dict[str, Any]


def sections(report: Report) -> list[Section]:
    """The report from the answer to the small print; a section without content is left out."""
    made = [
        Section("The answer", list(report["summary"])),
        _quality(report),
        _curves(report),
        _samples(report),
        speed_section(report),
        time_section(report),
        why_not_section(report),
        gpu_section(report),
        _parity(report),
        _not_measured(report),
        _settings(report),
    ]
    return [section for section in made if section.parts]


def _quality(report: Report) -> Section:
    groups = report["groups"]
    names = list(dict.fromkeys(name for group in groups.values() for name in group["quality"]))
    if not names:
        return Section("Quality", [])
    chosen = report["metric"]["name"]
    head = ["data", "recipe", *map(metric_words, names), "strategy", "batch", "n"]
    show_chosen = chosen not in names and any(group["chosen_by"] for group in groups.values())
    head += [metric_words(chosen)] if show_chosen else []
    rows = []
    for key, group in groups.items():
        values = [quality_of(group, n) for n in names]
        method = group["label"].removeprefix(f"{group['recipe']} ")
        row = [group["data"], group["recipe"], *values, method, at("d", "groups", key, "batch")]
        row.append(at("d", "groups", key, "n"))
        if show_chosen:
            spec = digits_for(chosen, group["chosen_by"])
            row.append(with_spread(spec, group["chosen_by"], "groups", key, "chosen_by"))
        rows.append(row)
    best = report["best_by_choice"]
    strong = {number for number, key in enumerate(groups) if key == best}
    note = "Mean ± sample standard deviation over seeds; n is their number. "
    note += f"The checkpoint of each run, and the row set off, are the best by {metric_said(chosen)}."
    if any(group["n"] == 1 for group in groups.values()):
        note += " One seed says nothing about spread: differences may be chance."
    return Section("Quality", [Table(head, rows, strong, note)])


def _curves(report: Report) -> Section:
    names = [name for name in report["plots"] if name.startswith(("quality", "loss"))]
    return Section("How they got there", [Plots(names)] if names else [])


def _samples(report: Report) -> Section:
    pictures = [(one["caption"], one["path"]) for one in report["samples"]]
    if not pictures:
        return Section("Samples", [])
    words = "What each makes of the same noise, or of the same pictures, at the end of its training; first seed."
    return Section("Samples", [words, Pictures(pictures)])


def agrees(parity: dict[str, Any]) -> bool:
    """Whether every difference is within what is allowed; one that is not finite is not."""
    return all(d["value"] is not None and d["value"] <= d["tolerance"] for d in parity["differences"])


def _parity(report: Report) -> Section:
    parts: list[str | Table | Plots | Pictures] = []
    for recipe, parity in report["parity"].items():
        rows = []
        for number, d in enumerate(parity["differences"]):
            where = ("parity", recipe, "differences", number)
            difference = "not finite" if d["value"] is None else at(".1e", *where, "value")
            allowed = at(".0e", *where, "tolerance")
            rows.append([d["strategy"], d["network"], d["kind"], difference, allowed, d["worst"] or NOTHING])
        passed = agrees(parity)
        words = "gives the same weights under every strategy" if passed else "does NOT give the same weights everywhere"
        parts.append(f"**{recipe}** {words}: {parity['what']}.")
        head = ["strategy", "network", "what", "difference", "allowed", "first tensor beyond"]
        parts.append(Table(head, rows, note="Largest |a − b| of a network ÷ its largest weight, against single."))
    return Section("The same weights?", parts)


def _not_measured(report: Report) -> Section:
    parts: list[str | Table | Plots | Pictures] = []
    cells = [cell for cell in report["cells"] if cell["state"] != "done"]
    if cells:
        rows = [[cell["name"], cell["state"], cell["reason"]] for cell in cells]
        parts.append(Table(["run", "state", "why"], rows))
    parts += [f"Not measured: {line}" for line in report["not_measured"]]
    return Section("What was not measured, and why", parts)


def _settings(report: Report) -> Section:
    rows = [[name, str(value)] for name, value in report["made_with"].items()]
    parts: list[str | Table | Plots | Pictures] = []
    if report["command"]:
        parts.append(f"Made by `{report['command']}`")
    parts.append(Table(["made with", ""], rows))
    settings = [[name, str(value)] for name, value in report["settings"].items()]
    parts.append(Table(["setting, alike in all runs", ""], settings))
    return Section("Settings, versions, hardware", parts)
