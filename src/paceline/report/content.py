"""The sections of a report. Each number is a placeholder with its path in report.json."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from paceline.contracts.step_ladder import StepLadder
from paceline.report.groups import RUN
from paceline.report.model import (
    COSTS,
    Checkpoint,
    Explanation,
    Group,
    Parity,
    Report,
    Run,
    Summary,
    TimeSplit,
    communication_share,
)
from paceline.report.parts import (
    NO_VALUE,
    Bullets,
    Command,
    Commands,
    Images,
    Note,
    Part,
    Plots,
    Section,
    Table,
    at,
    evaluated_images,
    format_for,
    listed,
    metric_heading,
    metric_in_text,
    metrics_in_order,
    quality_of,
    with_spread,
)
from paceline.runs.profile_summary import SECTION_NAMES, ProfileSummary

PARTS = {
    "data": "data wait",
    "host_to_device": "host to device",
    "compute": "compute",
    "communication": "communication",
    "step": "compute and communication",
    "between_steps": "between steps",
    "evaluation": "evaluation",
    "saving": "samples and saving",
}
NOTE = (
    "Seconds per epoch. "
    "The times for data wait, steps, evaluation and saving were measured during the runs with the host's clock. "
    "The step time is split into communication and compute according to the step-time breakdown. "
    "“Between steps” is the time that the training loop, such as Lightning's Trainer, spends outside the steps. "
    "Samples and checkpoints written after a run's last log line are not included."
)


def split_time(
    groups: Mapping[str, Group], ladders: Mapping[str, StepLadder], on_gpu: bool
) -> tuple[dict[str, TimeSplit], list[str]]:
    """Return the seconds per epoch by group and activity, and descriptions of what could not be measured."""
    split: dict[str, TimeSplit] = {}
    missing = []
    for key, group in groups.items():
        seconds = group.seconds_per_epoch
        if not seconds:
            continue
        row = {"data": seconds["data"]}
        share = communication_share(ladders[key]) if key in ladders else None
        if group.devices == 1:
            row["compute"] = seconds["step"]
        elif share is not None:
            row |= {"compute": seconds["step"] * (1 - share), "communication": seconds["step"] * share}
        else:
            row["step"] = seconds["step"]
            missing.append(f"communication time for {group.label} separately from compute (no step-time breakdown)")
        row |= {name: seconds[name] for name in ("between_steps", "evaluation", "saving") if name in seconds}
        split[key] = row | {"total": sum(row.values())}
    copies = "the copies overlap with the step" if on_gpu else "there are no copies on a CPU"
    missing.append(f"time spent on copies from host to device during the runs ({copies})")
    if not on_gpu:
        missing.append("GPU utilisation, memory and energy (no GPU was used, or NVML is unavailable)")
    return split, missing


WHOLE_COMPARISON = "all runs"
TEST_IMAGES = "test images"


def runs_section(report: Report) -> Section:
    """Return the section with one row per run, and the commands that repeat the runs."""
    groups = {folder: group for group in report.groups.values() for folder in group.runs}
    done = [(cell, cell.run) for cell in report.cells if cell.run is not None and cell.run.folder in groups]
    names = metrics_in_order((run.quality for _, run in done), report.metric.reported)
    commands = [Command(WHOLE_COMPARISON, report.command)] if report.command else []
    parts: list[Part] = []
    if done:
        alone = not all(run.side_by_side for _, run in done)
        head = [report.subject, "seed", *map(metric_heading, names), "checkpoint", "saved after, images"]
        head += [*_counted(report), *(["images/s"] if alone else []), "seconds"]
        rows = [
            [cell.label or groups[run.folder].label, *_row(run, names, _counted(report), alone)] for cell, run in done
        ]
        parts.append(Table(head, rows, note=_note(report), anchors=[cell.name for cell, _ in done]))
    commands += [Command(cell.name, cell.command) for cell in report.cells if cell.command]
    if commands:
        parts += ["Commands that repeat the runs. Click a command to select it, then copy it.", Commands(commands)]
    return Section("Every run", parts)


def _counted(report: Report) -> list[str]:
    """Return the headings of the columns with the number of evaluated images."""
    runs = report.runs.values()
    selected = any(run.selection_metric and run.selection_metric.num_evaluated for run in runs)
    tested = any(run.checkpoint and run.checkpoint.num_tested for run in runs)
    generated = any(run.selection_metric and run.selection_metric.num_real for run in runs)
    evaluated = "generated images" if generated else evaluated_images(report.metric.name)
    return [*([evaluated] if selected else []), *([TEST_IMAGES] if tested else [])]


def command_names(report: Report, keys: Iterable[str]) -> list[str]:
    """Return the name of the command that repeats the first run of each group; empty if it has no command."""
    names = {cell.run.folder: cell.name for cell in report.cells if cell.run is not None and cell.command}
    return [names.get(report.groups[key].runs[0], "") for key in keys]


def _row(run: Run, names: list[str], counted: list[str], alone: bool) -> list[str]:
    where = ("runs", run.folder)
    values = []
    for name in names:
        value = run.quality.get(name)
        summary = None if value is None else Summary(value, None, 1, [value])
        values.append(NO_VALUE if value is None else at(format_for(name, summary), *where, "quality", name))
    speed = at(",.0f", *where, "speed", "images_per_second") if run.speed and not run.side_by_side else NO_VALUE
    return [
        at("d", *where, "seed"),
        *values,
        kind_of(run.checkpoint),
        at(",d", *where, "checkpoint", "images") if run.checkpoint else NO_VALUE,
        *(_count(run, heading) for heading in counted),
        *([speed] if alone else []),
        at(".1f", *where, "seconds"),
    ]


def kind_of(checkpoint: Checkpoint | None) -> str:
    """Return which checkpoint of a run was evaluated: the best, the last, or one that is both."""
    if checkpoint is None:
        return NO_VALUE
    words = [word for word, holds in (("best", checkpoint.is_best), ("last", checkpoint.is_last)) if holds]
    return " and ".join(words) or "earlier"


def _count(run: Run, heading: str) -> str:
    """Return the number of images in the split given by a column heading."""
    where = ("runs", run.folder)
    if heading == TEST_IMAGES:
        tested = run.checkpoint is not None and run.checkpoint.num_tested
        return at(",.0f", *where, "checkpoint", "num_tested") if tested else NO_VALUE
    evaluated = run.selection_metric is not None and run.selection_metric.num_evaluated
    return at(",.0f", *where, "selection_metric", "num_evaluated") if evaluated else NO_VALUE


def _note(report: Report) -> str:
    note = "“Checkpoint” shows which checkpoint was evaluated: the best, the last, or one that is both."
    if report.metric.name:
        note += f" The best checkpoint has the best {metric_in_text(report.metric.name)}."
    if counted := _counted(report):
        columns = " and ".join(f"“{heading}”" for heading in counted)
        which = f"The column {columns} shows" if len(counted) == 1 else f"The columns {columns} show"
        note += f" {which} how many images the metrics are computed on."
    if any(run.side_by_side for run in report.runs.values()):
        note += (
            " The seconds include the time lost to other runs that were trained at the same time. "
            "The section “Speed” shows speeds that were measured separately."
        )
    return note


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
    shares.append(["no kernel or operator runs", at(".1%", *where, "gaps")])
    kernels = [[one.name, at(".1%", *where, "kernels", n, "share")] for n, one in enumerate(profile.kernels)]
    parts: list[Part] = [f"**Profile of {label}**: {steps}.", Table(["part of the loop", "share of the time"], shares)]
    parts += [Table(["kernel or operator", "share of the time"], kernels)] if kernels else []
    return parts


PARITY = "Do all strategies produce the same weights?"


def sections(report: Report, summary: Sequence[str], plots: Sequence[str]) -> list[Section]:
    """Return the non-empty sections, from the summary to the settings."""
    made = [
        Section("Summary", summary),
        _quality(report),
        _curves(plots),
        _samples(report),
        speed_section(report, plots),
        time_section(report, plots),
        scaling_costs_section(report),
        bottlenecks_section(report),
        gpu_section(report),
        _parity(report),
        runs_section(report),
        _not_measured(report),
        _settings(report),
    ]
    return [section for section in made if section.parts]


def _quality(report: Report) -> Section:
    groups = report.groups
    names = metrics_in_order((group.quality for group in groups.values()), report.metric.reported)
    if not names:
        return Section("Quality", [])
    selection = report.metric.name
    show_selection = selection not in names and any(group.selection_metric for group in groups.values())
    several_seeds = len({group.n for group in groups.values()}) > 1
    # The label of a run that the user named does not contain the differences, so they need their own columns.
    differences = list(dict.fromkeys(name for group in groups.values() for name in group.differences))
    differences = differences if report.subject == RUN and len(groups) > 1 else []
    head = [report.subject, *differences, *(["seeds"] if several_seeds else []), *map(metric_heading, names)]
    head += [metric_heading(selection)] if show_selection else []
    rows = []
    for key, group in groups.items():
        row = [group.label, *(group.differences.get(name, NO_VALUE) for name in differences)]
        row += [at("d", "groups", key, "n")] if several_seeds else []
        row += [quality_of(group, name) for name in names]
        if show_selection:
            spec = format_for(selection, group.selection_metric)
            row.append(with_spread(spec, group.selection_metric, "groups", key, "selection_metric"))
        rows.append(row)
    best = _best_groups(report)
    strong = {number for number, key in enumerate(groups) if key in best}
    return Section("Quality", [Table(head, rows, strong, _quality_note(report), command_names(report, groups))])


def _best_groups(report: Report) -> set[str]:
    """Return the groups whose selection metric, as displayed, equals the best; empty if all groups are equal."""
    name, groups = report.metric.name, report.groups
    if report.best_group is None:
        return set()
    spec = format_for(name, groups[report.best_group].selection_metric)
    shown = {key: format(one.selection_metric.mean, spec) for key, one in groups.items() if one.selection_metric}
    alike = {key for key, text in shown.items() if text == shown[report.best_group]}
    return alike if len(alike) < len(groups) else set()


def _quality_note(report: Report) -> str:
    groups = report.groups.values()
    averaged = any(group.n > 1 for group in groups)
    notes = ["Mean ± sample standard deviation over the seeds."] if averaged else []
    if report.metric.name:
        best = f"the best {metric_in_text(report.metric.name)}"
        notes.append(f"Each run is evaluated at its checkpoint with {best}.")
        notes += _evaluated_images(report)
        notes += [f"Highlighted: {best} of all rows."] if _best_groups(report) else []
    else:
        notes.append("The recipe has no metric for selecting checkpoints, or its code was not loaded (see --trust).")
    if any(group.n == 1 for group in groups):
        notes.append("With a single seed, the spread is unknown, and differences may be due to chance.")
    return " ".join(notes)


def _evaluated_images(report: Report) -> list[str]:
    """Return how many images each split has, if the numbers are the same for all runs."""
    counts = {
        (run.selection_metric.num_evaluated, run.checkpoint.num_tested, run.selection_metric.num_real)
        for run in report.runs.values()
        if run.selection_metric and run.checkpoint
    }
    first = next(iter(report.runs), "")
    if len(counts) != 1:
        return []
    ((evaluated, tested, real),) = counts
    where = evaluated_images(report.metric.name)
    count = at(",.0f", "runs", first, "selection_metric", "num_evaluated")
    if evaluated and real:
        of_real = at(",.0f", "runs", first, "selection_metric", "num_real")
        return [f"The metrics compare {count} generated images with {of_real} {where}."]
    parts = [f"{count} {where}"] if evaluated else []
    parts += [f"{at(',.0f', 'runs', first, 'checkpoint', 'num_tested')} test images"] if tested else []
    return [f"The metrics are computed on {' and '.join(parts)}."] if parts else []


def _curves(plots: Sequence[str]) -> Section:
    names = [name for name in plots if name.startswith(("quality", "loss"))]
    return Section("Training curves", [Plots(names)] if names else [])


def _samples(report: Report) -> Section:
    if not report.samples:
        return Section("Samples", [])
    inputs = "All rows use the same noise or the same input images." if len(report.groups) > 1 else ""
    parts: list[Part] = [f"Samples from the end of training. {inputs} Click an image to enlarge it."]
    parts.append(Images(report.samples))
    for gallery in report.progress:
        parts += [f"**Progress of {gallery.label}**, by the number of training images seen:"]
        parts.append(Images(gallery.progress, small=True))
    return Section("Samples", parts)


def _parity(report: Report) -> Section:
    parts: list[Part] = []
    for recipe, parity in report.parity.items():
        words = "produces the same weights under every strategy"
        words = words if parity.holds else "does NOT produce the same weights under every strategy"
        parts += [f"**{recipe}** {words}: {parity.description}.", _parity_table(recipe, parity)]
    return Section(PARITY, parts)


def _parity_table(recipe: str, parity: Parity) -> Table:
    rows = []
    for number, one in enumerate(parity.differences):
        where = ("parity", recipe, "differences", number)
        difference = "not finite" if one.value is None else at(".1e", *where, "value")
        tolerance = at(".0e", *where, "tolerance")
        rows.append([one.strategy, one.network, one.kind, difference, tolerance, one.worst or NO_VALUE])
    head = ["strategy", "network", "tensors", "difference", "tolerance", "first tensor above the tolerance"]
    note = (
        "The difference is max |a − b| ÷ max |b| over all values in a network, where a is the value after training "
        "with this strategy, and b is the value after training on one device."
    )
    return Table(head, rows, note=note)


def _not_measured(report: Report) -> Section:
    parts: list[Part] = []
    cells = [cell for cell in report.cells if cell.state != "done"]
    if cells:
        parts.append(Table(["run", "state", "reason"], [[cell.name, cell.state, cell.reason] for cell in cells]))
    parts += [Bullets([f"{line[:1].upper()}{line[1:]}" for line in report.not_measured])] if report.not_measured else []
    return Section("What was not measured and why", parts)


def _settings(report: Report) -> Section:
    parts: list[Part] = []
    parts.append(Table(["versions and hardware", ""], [list(one) for one in report.provenance.items()]))
    settings = [[name, str(value)] for name, value in report.settings.items()]
    parts.append(Table(["settings common to all runs", ""], settings))
    return Section("Settings, versions and hardware", parts, folded=True)
