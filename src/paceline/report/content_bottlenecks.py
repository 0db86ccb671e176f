"""The section about what delays the runs: stragglers and profiles."""

from __future__ import annotations

from paceline.report.model import Report
from paceline.report.parts import Part, Section, Table
from paceline.report.phrases import at
from paceline.report.run import Run
from paceline.runs.profile_summary import SECTION_NAMES, ProfileSummary


def bottlenecks_section(report: Report) -> Section:
    """Return the section with the stragglers and profiles of the runs; empty if there are none."""
    labels = {folder: group.label for group in report.groups.values() for folder in group.runs}
    runs = {folder: run for folder, run in report.runs.items() if folder in labels}
    parts: list[Part] = _stragglers(runs, labels)
    for folder, run in runs.items():
        if run.profile:
            parts += _profile(folder, labels[folder], run.profile)
    return Section("What delays the runs?", parts)


def _stragglers(runs: dict[str, Run], labels: dict[str, str]) -> list[Part]:
    rows = []
    for folder, run in runs.items():
        if run.straggler:
            where = ("runs", folder, "straggler")
            slowdown, share = at(".0%", *where, "slowdown"), at(".0%", *where, "share")
            rows.append([labels[folder], at("d", "runs", folder, "seed"), at("d", *where, "rank"), slowdown, share])
    if not rows:
        return []
    note = (
        "The straggler is a rank whose own work per step takes longer than that of the other ranks, which then wait "
        "for it. On GPUs, only the time that a rank waits for data is compared."
    )
    head = ["run", "seed", "straggler (rank)", "steps take longer by", "share of the log intervals"]
    return [Table(head, rows, note=note)]


def _profile(folder: str, label: str, profile: ProfileSummary) -> list[Part]:
    where = ("runs", folder, "profile")
    count = f"{at('d', *where, 'num_steps')} step{'s' * (profile.num_steps > 1)}"
    steps = f"{count} of {at('.4g', *where, 'step_seconds')} s on {profile.device}"
    shares = [[SECTION_NAMES.get(name, name), at(".1%", *where, "sections", name)] for name in profile.sections]
    shares += [[name, at(".1%", *where, "phases", name)] for name in profile.phases]
    shares.append(["communication that delays the step", at(".1%", *where, "exposed_communication")])
    shares += [[what, at(".1%", *where, "waits", what)] for what in profile.waits]
    shares.append(["no kernel or operator runs", at(".1%", *where, "gaps")])
    kernels = [[one.name, at(".1%", *where, "kernels", n, "share")] for n, one in enumerate(profile.kernels)]
    remedies = [
        [one.action, at(".1%", *where, "remedies", n, "gain"), one.reason] for n, one in enumerate(profile.remedies)
    ]
    parts: list[Part] = [f"**Profile of {label}**: {steps}.", Table(["part of the loop", "share of the time"], shares)]
    parts += [Table(["kernel or operator", "share of the time"], kernels)] if kernels else []
    note = "Each gain is an estimate from the shares above: the fraction of the time that the change would save."
    parts += [Table(["remedy", "estimated gain", "reason"], remedies, note=note)] if remedies else []
    return parts
