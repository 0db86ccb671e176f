"""The sections about speed: throughput, time per epoch, scaling costs and GPU measurements."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from paceline.report.content_runs import command_names
from paceline.report.metric_names import with_spread
from paceline.report.model import Group, Report
from paceline.report.parts import Note, Part, Plots, Section, Table
from paceline.report.phrases import NO_VALUE, at, listed
from paceline.report.step_ladder import COSTS, Explanation
from paceline.report.time_split import PARTS

SUPERLINEAR = 1.1  # a higher efficiency cannot be explained by the number of devices alone
GPU_COLUMNS = {
    "utilisation": ("utilisation, %", ".0f"),
    "peak_memory_gib": ("peak memory, GiB", ".2f"),
    "power_watts": ("power, W", ".0f"),
    "joules_per_1000_images": ("energy, J per 1,000 images", ".1f"),
}


def speed_section(report: Report, plots: Sequence[str]) -> Section:
    """Return the section with the throughput and scaling of each group."""
    measured = {key: group for key, group in report.groups.items() if group.images_per_second}
    if not measured:
        return Section("Speed", [])
    scaled = any(group.scaling for group in measured.values())
    timed = not all(group.side_by_side for group in measured.values())
    threads = len({group.num_threads for group in measured.values()}) > 1
    head = [report.subject, "images/s", "without loading", *(["seconds per run"] if timed else [])]
    head += ["threads per process"] if threads else []
    head += ["× one device", "efficiency"] if scaled else []
    rows = [_speed_row(key, group, timed, threads, scaled) for key, group in measured.items()]
    advice = report.recommendation
    strong = {number for number, key in enumerate(measured) if advice and key == advice.group}
    own = [name for name in ("speed", "scaling") if name in plots]
    table = Table(head, rows, strong, _speed_note(report.groups), command_names(report, measured))
    return Section("Speed", [table, *([Plots(own)] if own else [])])


def _speed_row(key: str, group: Group, timed: bool, threads: bool, scaled: bool) -> list[str]:
    where = ("groups", key)
    without_loading = group.images_per_second_without_loading
    row = [
        group.label,
        _speed_with_spread(key, group),
        with_spread(",.0f", without_loading, *where, "images_per_second_without_loading"),
    ]
    if timed:
        row.append(NO_VALUE if group.side_by_side else with_spread(".1f", group.seconds, *where, "seconds"))
    if threads:
        row.append(at("d", *where, "num_threads") if group.num_threads else NO_VALUE)
    if scaled:
        row.append(at(".2f", *where, "scaling", "speedup") if group.scaling else NO_VALUE)
        row.append(at(".0%", *where, "scaling", "efficiency") if group.scaling else NO_VALUE)
    return row


def _speed_with_spread(key: str, group: Group) -> str:
    """Return the speed ± its standard deviation over seeds or, with a single seed, over log intervals."""
    mean = at(",.0f", "groups", key, "images_per_second", "mean")
    return mean if group.speed_spread.std is None else f"{mean} ± {at(',.0f', 'groups', key, 'speed_spread', 'std')}"


def _speed_note(groups: Mapping[str, Group]) -> str:
    note = (
        "Training throughput across all devices. The first log interval after each start is left out, because it "
        f"includes warm-up. {_spread_note(groups)}"
    ).rstrip()
    if any(not group.side_by_side for group in groups.values()):
        note += " Seconds per run include evaluation and saving, but not start-up."
    note += "".join(f" {sentence}" for sentence in busy_sentences(groups))
    if apart := _labels(group for group in groups.values() if group.side_by_side):
        note += (
            f" Measured separately: {apart}. These runs were trained at the same time as others (--jobs), so their "
            "speed was measured afterwards, in a short run with the same settings and no other run at the same time."
        )
    if unsettled := _labels(group for group in groups.values() if group.includes_warmup):
        note += (
            f" {unsettled}: a run has only one log interval, so its speed includes warm-up and excludes the time "
            "between steps."
        )
    kinds = {group.scaling.kind for group in groups.values() if group.scaling}
    if kinds:
        same = " or ".join(
            "the same global batch" if kind == "strong" else "the same batch per device" for kind in sorted(kinds)
        )
        note += f" “× one device” is the speed relative to one device with {same}."
    if any(group.shares_a_gpu for group in groups.values()):
        note += (
            " Rows marked “on one GPU” run several processes on a single GPU. "
            "They show whether the results are equal, but not how fast several GPUs are."
        )
    if beyond := _labels(group for group in groups.values() if is_superlinear(group)):
        note += (
            f" Efficiency above 110 % ({beyond}): either other jobs slowed down the single-device run, "
            "or the smaller batch per device fits the cache better."
        )
    if crowded := _labels(group for group in groups.values() if group.more_processes_than_cores):
        note += f" {crowded}: there were more processes than CPU cores."
    return note


def _spread_note(groups: Mapping[str, Group]) -> str:
    over = [group.speed_spread.over for group in groups.values() if group.speed_spread.over]
    return f"± is the standard deviation over {' or '.join(dict.fromkeys(over))}. " if over else ""


def busy_sentences(groups: Mapping[str, Group]) -> list[str]:
    """Return a warning if the machine was busy while speeds were measured."""
    busy = {key: group for key, group in groups.items() if group.was_busy}
    if not busy:
        return []
    highest = max(busy, key=lambda key: busy[key].load_average or 0.0)
    who = "all rows" if len(busy) == len(groups) else _labels(busy.values())
    load = at(".1f", "groups", highest, "load_average")
    return [
        f"The machine was busy while the speed was measured (load average up to {load}, more than the number of "
        f"cores), so the speeds may be too low: {who}."
    ]


def _labels(groups: Iterable[Group]) -> str:
    return listed(group.label for group in groups)


def is_superlinear(group: Group) -> bool:
    """Return whether the efficiency of a group is too high to be explained by its number of devices."""
    return group.scaling is not None and group.scaling.efficiency > SUPERLINEAR


def time_section(report: Report, plots: Sequence[str]) -> Section:
    """Return the section that shows how an epoch's time is spent."""
    title = "Time per epoch"
    columns = [name for name in PARTS if any(name in row for row in report.time_split.values())]
    if not columns:
        return Section(title, [])
    rows = [
        [
            report.groups[key].label,
            *(at(".2f", "time_split", key, name) if name in row else NO_VALUE for name in (*columns, "total")),
        ]
        for key, row in report.time_split.items()
    ]
    table = Table([report.subject, *(PARTS[name] for name in columns), "total"], rows, note=report.time_split_note)
    return Section(title, [*([Plots(["time"])] if "time" in plots else []), table])


def scaling_costs_section(report: Report) -> Section:
    """Return the section with the step-time breakdown and largest cost for each group on several devices."""
    parts: list[Part] = []
    for key, ladder in report.scaling_costs.items():
        parts += [_largest_cost(report, key, ladder), _ladder_table(key, ladder)]
    parts += [Note(report.scaling_costs_note)] if parts else []
    return Section("Why not N×?", parts)


def _largest_cost(report: Report, key: str, ladder: Explanation) -> str:
    group, where = report.groups[key], ("scaling_costs", key)
    if ladder.largest_cost is None:
        return f"**{group.label}** scales without a measurable loss."
    number = next(i for i, rung in enumerate(ladder.rungs) if rung.name == ladder.largest_cost)
    cost, remedy = COSTS[ladder.largest_cost]
    in_runs = (
        f" (during the runs: {at('.0%', 'groups', key, 'scaling', 'efficiency')}; see Speed)" if group.scaling else ""
    )
    return (
        f"**{group.label}** reaches {at('.0%', *where, 'efficiency')} of the ideal {at('d', *where, 'devices')}× "
        f"speedup in this measurement{in_runs}. "
        f"The largest cost accounts for {at('.0%', *where, 'rungs', number, 'share')} of the time: {cost}. "
        f"Best remedy: {remedy}. Without this cost, throughput would be {at('.0%', *where, 'gain')} higher."
    )


def _ladder_table(key: str, ladder: Explanation) -> Table:
    rows = []
    for number, rung in enumerate(ladder.rungs):
        where = ("scaling_costs", key, "rungs", number)
        what = COSTS[rung.name][0] if rung.name in COSTS else f"{ladder.devices} × the speed of one device"
        what += " with its slice of the batch" if rung.name == "ideal" and ladder.weak else ""
        share = at(".1%", *where, "share") if rung.share is not None else NO_VALUE
        rows.append([what, at(",.0f", *where, "images_per_second"), share])
    return Table(["cost added to the step", "images/s", "fraction of time"], rows)


def gpu_section(report: Report) -> Section:
    """Return the section with the NVML measurements."""
    with_gpu = {key: group for key, group in report.groups.items() if group.gpu}
    columns = [name for name in GPU_COLUMNS if any(name in group.gpu for group in with_gpu.values())]
    if not columns:
        return Section("GPU", [])
    rows = [
        [group.label]
        + [at(GPU_COLUMNS[name][1], "groups", key, "gpu", name) if name in group.gpu else NO_VALUE for name in columns]
        for key, group in with_gpu.items()
    ]
    note = (
        "NVML measurements for the GPU of the first process, averaged over log intervals. "
        "Peak memory is measured by PyTorch. "
        "Energy is measured on one GPU and multiplied by the number of GPUs, assuming that all draw the same power."
    )
    return Section("GPU", [Table([report.subject, *(GPU_COLUMNS[name][0] for name in columns)], rows, note=note)])
