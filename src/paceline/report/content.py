"""What a report says, section by section, for a page and for Markdown alike. Its numbers are places in report.json."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from paceline.report.losses import STEPS
from paceline.report.phrases import NOTHING, at

Report = dict[str, Any]
METRIC_WORDS = {"top1": "top-1", "top5": "top-5", "loss": "loss"}
SPLIT_WORDS = {
    "data": "data wait",
    "host_to_device": "host to device",
    "compute": "compute",
    "communication": "communication",
    "step": "step, not split",
    "evaluation": "evaluation",
    "saving": "samples and saving",
}


@dataclass
class Table:
    """Cells are phrases; `strong` rows are set off."""

    head: list[str]
    rows: list[list[str]]
    strong: set[int] = field(default_factory=set)
    note: str = ""


@dataclass
class Plots:
    """Names of plots that stand side by side; Markdown leaves them out."""

    names: list[str]


@dataclass
class Pictures:
    """Samples side by side: (caption, path of a picture)."""

    pictures: list[tuple[str, str]]


@dataclass
class Section:
    """A title and what is under it: phrases, tables, plots, pictures."""

    title: str
    parts: list[str | Table | Plots | Pictures]


def sections(report: Report) -> list[Section]:
    """The report from the answer to the small print; a section without content is left out."""
    made = [
        Section("The answer", list(report["summary"])),
        _quality(report),
        _curves(report),
        _samples(report),
        _speed(report),
        _time(report),
        _why_not(report),
        _gpu(report),
        _parity(report),
        _not_measured(report),
        _settings(report),
    ]
    return [section for section in made if section.parts]


def metric_words(name: str) -> str:
    """`test/top1` as a heading."""
    split, _, metric = name.partition("/")
    plain, bracket, label = metric.partition("[")
    unit = ", %" if plain.startswith("top") else ""
    where = f" ({label.removesuffix(']')})" if bracket else ""
    return f"{split} {METRIC_WORDS.get(plain, plain)}{unit}{where}"


def metric_said(name: str) -> str:
    """`test/top1` inside a sentence."""
    return metric_words(name).replace(", %", "")


def digits_for(name: str, summary: dict[str, Any] | None) -> str:
    """As many decimals as a metric's size leaves room for; mean and spread have the same."""
    size = abs(summary["mean"]) if summary else 0.0
    if "/top" in name:
        return ".2f"
    return ".1f" if size >= 100 else ".2f" if size >= 10 else ".3f" if size >= 1 else ".4f"


def with_spread(spec: str, summary: dict[str, Any] | None, *path: str | int) -> str:
    """mean ± standard deviation, where there are several values."""
    if summary is None:
        return NOTHING
    mean = at(spec, *path, "mean")
    return mean if summary["std"] is None else f"{mean} ± {at(spec, *path, 'std')}"


def quality_of(group: dict[str, Any], name: str) -> str:
    """A group's metric, with its spread."""
    summary = group["quality"].get(name)
    return with_spread(digits_for(name, summary), summary, "groups", group["id"], "quality", name)


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


def _speed(report: Report) -> Section:
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
    note = "Images per second of training alone, after the first logged stretch (warm-up), over all devices. "
    note += "Seconds a run has evaluation and saving in it, and no start-up."
    kinds = {group["scaling"]["kind"] for group in groups.values() if group["scaling"]}
    if kinds:
        same = " and ".join(
            "the same global batch" if k == "strong" else "the same batch per device" for k in sorted(kinds)
        )
        note += f" × one device: against single with {same}."
    if any(group["shares_a_gpu"] for group in groups.values()):
        note += " Rows “on one GPU” put several processes on one device: they show equality, not speed."
    plots = [name for name in ("speed", "scaling") if name in report["plots"]]
    return Section("Speed", [Table(head, rows, strong, note), *([Plots(plots)] if plots else [])])


def _time(report: Report) -> Section:
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


def _why_not(report: Report) -> Section:
    parts: list[str | Table | Plots | Pictures] = []
    for key, ladder in report["why_not"].items():
        label = report["groups"][key]["label"]
        where = ("why_not", key)
        if ladder["largest"]:
            number = next(i for i, rung in enumerate(ladder["rungs"]) if rung["name"] == ladder["largest"])
            cause, fix = STEPS[ladder["largest"]]
            parts.append(
                f"**{label}** reaches {at('.0%', *where, 'efficiency')} of {at('d', *where, 'devices')}×. "
                f"The largest loss, {at('.0%', *where, 'rungs', number, 'lost')} of the ideal: {cause}. "
                f"What would pay most: {fix}; without this loss, {at('+.0%', *where, 'gain')} images per second."
            )
        else:
            parts.append(f"**{label}** loses nothing that could be measured.")
        rows = []
        for number, rung in enumerate(ladder["rungs"]):
            what = f"{ladder['devices']} × one device alone" if rung["name"] == "ideal" else STEPS[rung["name"]][0]
            lost = at(".1%", *where, "rungs", number, "lost") if "lost" in rung else NOTHING
            rows.append([what, at(",.0f", *where, "rungs", number, "images_per_second"), lost])
        parts.append(Table(["step by step", "images/s", "lost of the ideal"], rows, note=report["why_not_note"]))
    return Section("Why not N×?", parts)


def _gpu(report: Report) -> Section:
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
    note = "As NVML says for the first process's GPU: means over the readings at each log, the peak of torch's memory."
    return Section("GPU", [Table(["strategy", *(heads[name][0] for name in columns)], rows, note=note)])


def _parity(report: Report) -> Section:
    parts: list[str | Table | Plots | Pictures] = []
    for recipe, parity in report["parity"].items():
        rows = []
        for number, d in enumerate(parity["differences"]):
            where = ("parity", recipe, "differences", number)
            difference, allowed = at(".1e", *where, "value"), at(".0e", *where, "tolerance")
            rows.append([d["strategy"], d["network"], d["kind"], difference, allowed, d["worst"] or NOTHING])
        passed = all(d["value"] <= d["tolerance"] for d in parity["differences"])
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
