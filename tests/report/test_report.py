"""The HTML, Markdown and JSON reports of finished runs contain the numbers that the runs recorded."""

from __future__ import annotations

import json
import re
import shutil
import statistics
from dataclasses import fields
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from running import run_fork, run_ranks

from paceline.cli.app import run
from paceline.report.plots import Series, lines, ticks
from paceline.runs.recipe import load_recipe

TINY_GAN = str(Path(__file__).parent.parent / "tiny_gan.py")
TINY = ["train", "classification", "--preset", "quick", "--set", "width=8", "--set", "log_every=8 steps"]
TINY += ["--epochs", "2", "--accelerator", "cpu"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train two runs in one process and one run in two processes, and write their report."""
    folder = tmp_path_factory.mktemp("finished")
    for seed in ("2", "4"):
        done = run_fork(folder, *TINY, "--seed", seed, "--out", f"single-{seed}")
        assert done.wait() == 0, done.stderr
    assert run_ranks(folder, 2, *TINY, "--strategy", "ddp", "--seed", "2", "--out", "ddp-2") == [0, 0]
    compared = run_fork(folder, "compare", "single-2", "single-4", "ddp-2", "--out", "compared")
    assert compared.wait() == 0, compared.stderr
    assert compared.stdout.rstrip().endswith("report: compared/report.html")
    return folder


@pytest.fixture(scope="module")
def report(runs: Path) -> dict[str, Any]:
    return json.loads((runs / "compared/report.json").read_text())


class Page(HTMLParser):
    """Collects the tags of a report page, its table cells, and all URLs that a browser would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.tags: set[str] = set()
        self.cells: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.fetched += [value or "" for name, value in attributes if name in ("src", "href")]
        if tag == "td":
            self.cells.append("")

    def handle_data(self, data: str) -> None:
        if self.cells:
            self.cells[-1] += data.strip()


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_the_page_and_the_markdown_show_the_numbers_in_the_json(runs: Path, report: dict[str, Any]) -> None:
    cells, text = Page((runs / "compared/report.html").read_text()).cells, (runs / "compared/report.md").read_text()
    for group in report["groups"].values():
        speed, top1 = group["images_per_second"], group["quality"]["test/top1"]
        expected = [f"{speed['mean']:,.0f} ± {group['speed_std']:,.0f}", f"{top1['mean']:.2f}"]
        expected += [f"{group['scaling']['efficiency']:.0%}".replace("%", " %")] if group["scaling"] else []
        for shown in expected:
            assert shown in text and any(cell.startswith(shown) for cell in cells), shown
    assert "± is the standard deviation over seeds or, for a single seed, over log intervals" in text
    for folder, found in report["runs"].items():
        row = next(line for line in text.partition("## Every run")[2].splitlines() if line.startswith(f"| {folder} |"))
        evaluated = [line for line in lines_of(runs / folder) if "validation/top1" in line]
        best = max(evaluated, key=lambda line: line["validation/top1"])
        assert found["checkpoint"] == best["images"]
        assert found["selection_metric"]["num_evaluated"] == best["validation/count"]
        for shown in (f"{found['quality']['test/top1']:.2f}", f"{best['images']:,}", f"{found['seconds']:.1f}"):
            assert f"| {shown} |" in row
    assert all(sentence in text for sentence in report["summary"])


def test_the_json_contains_the_run_results(runs: Path, report: dict[str, Any]) -> None:
    single = report["groups"]["classification-single-1-64"]
    tested = [next(x for x in lines_of(runs / f"single-{seed}") if "test/top1" in x) for seed in (2, 4)]
    for name in ("test/top1", "test/top5", "test/loss"):
        values = [line[name] for line in tested]
        assert single["quality"][name]["values"] == values
        assert single["quality"][name]["mean"] == pytest.approx(statistics.mean(values))
        assert single["quality"][name]["std"] == pytest.approx(statistics.stdev(values))
    speeds = []
    for seed in (2, 4):
        logged = [line for line in lines_of(runs / f"single-{seed}") if "time/step_seconds" in line]
        lengths = [line["images"] - before["images"] for before, line in pairwise(logged)]
        seconds = [n / line["time/images_per_second"] for n, line in zip(lengths, logged[1:], strict=True)]
        speeds.append(sum(lengths) / sum(seconds))
    assert single["images_per_second"]["values"] == pytest.approx(speeds)
    ddp = report["groups"]["classification-ddp-2-64"]
    assert ddp["n"] == 1 and ddp["scaling"]["speedup"] == pytest.approx(
        ddp["images_per_second"]["mean"] / single["images_per_second"]["mean"]
    )
    assert ddp["scaling"]["efficiency"] == pytest.approx(ddp["scaling"]["speedup"] / 2)


def test_the_html_report_loads_nothing_from_other_files_or_the_network(runs: Path) -> None:
    text = (runs / "compared/report.html").read_text()
    page = Page(text)
    assert page.fetched and all(address.startswith(("data:", "#")) for address in page.fetched)
    assert "script" not in page.tags and "http" not in re.sub(r"data:[^\"]*", "", text)
    assert "prefers-color-scheme: dark" in text and "@media print" in text and "svg" in page.tags


def test_a_report_lists_what_was_not_measured(report: dict[str, Any]) -> None:
    expected = " ".join(report["not_measured"])
    assert "GPU utilisation" in expected and "step-time breakdown and parity" in expected


def test_runs_that_cannot_be_compared_are_rejected(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(runs)
    text = (runs / "single-2/config.toml").read_text()
    for name, changed in {
        "other-data": text.replace('data = "1,', 'data = "9,'),
        "other-recipe": text.replace('recipe = "classification"', 'recipe = "dcgan"'),
    }.items():
        (runs / name).mkdir(exist_ok=True)
        assert changed != text
        (runs / name / "config.toml").write_text(_as_dcgan(changed) if name == "other-recipe" else changed)
    (runs / "empty").mkdir(exist_ok=True)
    for words, message in {
        ("single-2", "other-data"): "single-2 and other-data were trained on different data",
        ("single-2", "other-recipe"): "single-2 and other-recipe have different recipes (classification, dcgan)",
        ("single-2", "empty"): "empty: not a run",
        ("single-2", "nowhere"): "nowhere: not a run",
    }.items():
        assert run(["compare", *words, "--out", "rejected"]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
    assert not (runs / "rejected").exists()


def _as_dcgan(text: str) -> str:
    own = {field.name for field in fields(load_recipe("classification").Settings)}
    return "\n".join(line for line in text.splitlines() if line.split(" = ")[0] not in own) + "\n"


def test_malformed_lines_in_metrics_jsonl_are_skipped_and_counted(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(runs)
    shutil.copytree("single-2", "torn")
    with open("torn/metrics.jsonl", "a") as file:
        file.write('{"images": 9000, "test/top1": 99.0, "test/checkpoint_images": 9000}\n')  # without "seconds"
        file.write('{"images": 9000, "seconds": 9.0, "test/top1": "high", "test/checkpoint_images": 9000}\n')
        file.write('{"images": 9000, "seconds": 1e999, "validation/top1": 99.0}\n{"images": 90')
    assert run(["compare", "torn", "single-4", "--out", "with-torn"]) == 0
    report = json.loads(Path("with-torn/report.json").read_text())
    before = json.loads(Path("compared/report.json").read_text())
    assert "4 malformed lines in torn/metrics.jsonl (skipped)" in report["not_measured"]
    Path("torn/metrics.jsonl").write_bytes(b"\x00\xff\n" * 3)
    assert run(["compare", "torn", "single-4", "--out", "with-binary"]) == 0
    binary = json.loads(Path("with-binary/report.json").read_text())
    assert "3 malformed lines in torn/metrics.jsonl (skipped)" in binary["not_measured"]
    name = "classification-single-1-64"
    assert report["groups"][name]["quality"] == before["groups"][name]["quality"]
    assert report["groups"][name]["images_per_second"] == before["groups"][name]["images_per_second"]


def test_a_run_without_provenance_is_rejected(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(runs)
    shutil.copytree("single-2", "unknown")
    text = Path("unknown/config.toml").read_text()
    Path("unknown/config.toml").write_text(text.partition("[provenance]")[0])
    assert run(["compare", "unknown", "--out", "of-unknown"]) == 2
    message = "paceline: unknown/config.toml: damaged: [provenance] is missing: restore the file\n"
    assert capsys.readouterr().err == message


def test_a_run_from_another_machine_has_a_separate_row(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(runs)
    shutil.copytree("single-4", "elsewhere")
    text = Path("elsewhere/config.toml").read_text()
    Path("elsewhere/config.toml").write_text(re.sub('cpu = ".*"', 'cpu = "another | <one>::two"', text))
    assert run(["compare", "single-2", "elsewhere", "ddp-2", "--out", "of-two"]) == 0
    groups = json.loads(Path("of-two/report.json").read_text())["groups"]
    assert [group["n"] for group in groups.values()] == [1, 1, 1]
    assert [group["label"] for group in groups.values()] == ["single-2", "elsewhere", "ddp-2"]
    assert list(groups.values())[1]["differences"] == {"strategy": "single", "cpu": "another | <one>::two"}
    assert list(groups.values())[2]["scaling"]["baseline"] == next(iter(groups))


def test_the_speed_of_a_run_resumed_with_changes_is_measured_over_its_last_part(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(runs)
    half = run_ranks(runs, 2, *TINY, "--epochs", "1", "--strategy", "ddp", "--seed", "6", "--out", "resumed")
    whole = run_fork(runs, *TINY, "--seed", "6", "--out", "resumed")
    assert half == [0, 0] and whole.wait() == 0, whole.stderr
    assert run(["compare", "resumed", "single-2", "--out", "of-resumed"]) == 0
    report = json.loads(Path("of-resumed/report.json").read_text())
    (only,) = report["groups"].values()
    assert only["label"] == "resumed, single-2" and only["strategy"] == "single" and only["n"] == 2
    logged = [line for line in lines_of(Path("resumed")) if "time/step_seconds" in line]
    since = next(line["images"] for line in logged if line["epoch"] >= 1)
    later = [line for line in logged if line["images"] > since][1:]
    assert report["runs"]["resumed"]["speed"]["num_log_intervals"] == len(later)
    (note,) = [line for line in report["not_measured"] if "was resumed with changes" in line]
    assert note.endswith(f"at {since:,} images (strategy ddp → single, devices 2 → 1)")


def test_a_report_includes_runs_with_a_strategy_that_is_not_installed(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(runs)
    shutil.copytree("single-2", "elsewhere-2")
    text = Path("elsewhere-2/config.toml").read_text()
    Path("elsewhere-2/config.toml").write_text(text.replace('strategy = "single"', 'strategy = "from-a-plugin"'))
    assert run(["compare", "elsewhere-2", "single-4", "--out", "of-plugin"]) == 0
    report = json.loads(Path("of-plugin/report.json").read_text())
    assert [group["strategy"] for group in report["groups"].values()] == ["from-a-plugin", "single"]
    assert report["groups"]["classification-from-a-plugin-1-64"]["scaling"]["baseline"] == "classification-single-1-64"


def test_energy_is_summed_across_all_gpus(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(runs)
    shutil.copytree("ddp-2", "with-gpus")
    read = [x | {"gpu/utilisation": 50.0, "gpu/energy_joules": 1000.0 + x["images"]} for x in lines_of(Path("ddp-2"))]
    Path("with-gpus/metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in read))
    assert run(["compare", "with-gpus", "--out", "of-gpus"]) == 0
    (only,) = json.loads(Path("of-gpus/report.json").read_text())["groups"].values()
    assert only["gpu"]["joules_per_1000_images"] == pytest.approx(2 * 1000)
    assert "Energy is measured on one GPU and multiplied by the number of GPUs" in Path("of-gpus/report.md").read_text()


def test_a_run_that_was_stopped_or_lost_its_metrics_is_listed_with_the_reason(runs: Path) -> None:
    stopped = run_fork(runs, *TINY, "--seed", "5", "--images", "640", "--out", "stopped")
    assert stopped.wait() == 0
    text = (runs / "stopped/config.toml").read_text()
    (runs / "stopped/config.toml").write_text(text.replace("images = 640", "images = 6400"))
    shutil.copytree(runs / "single-2", runs / "emptied")
    (runs / "emptied/metrics.jsonl").unlink()
    done = run_fork(runs, "compare", "single-2", "stopped", "emptied", "--out", "with-stopped")
    assert done.wait() == 0 and "2 runs have no results" in " ".join(done.stdout.split())
    report = json.loads((runs / "with-stopped/report.json").read_text())
    assert [cell["state"] for cell in report["cells"]] == ["done", "unfinished", "unfinished"]
    assert [cell["reason"] for cell in report["cells"][1:]] == ["stopped at 640 images", "no metrics"]
    assert [group["n"] for group in report["groups"].values()] == [1]


def test_generative_runs_are_compared_only_if_they_were_evaluated_in_the_same_way(tmp_path: Path) -> None:
    for seed in ("0", "1"):
        done = run_fork(
            tmp_path, "train", TINY_GAN, "--accelerator", "cpu", "--images", "640", "--seed", seed, "--out", seed
        )
        assert done.wait() == 0, done.stderr
    assert run_fork(tmp_path, "compare", "0", "1", "--trust", "--out", "both").wait() == 0
    page = Page((tmp_path / "both/report.html").read_text())
    # Real images, the last samples, and two stages of training, all for the first seed only.
    assert sum(address.startswith("data:image/png;base64,") for address in page.fetched) == 4
    linked = re.findall(r"!\[(.+?)\]\((.+)\)", (tmp_path / "both/report.md").read_text())
    assert [(caption, (tmp_path / "both" / path).resolve()) for caption, path in linked] == [
        ("real images", tmp_path / "0/samples/real-000000000000.png"),
        ("0, 1, seed 0, after 640 images", tmp_path / "0/samples/samples-000000000640.png"),
        ("0 images", tmp_path / "0/samples/samples-000000000000.png"),
        ("640 images", tmp_path / "0/samples/samples-000000000640.png"),
    ]
    report = json.loads((tmp_path / "both/report.json").read_text())
    (only,) = report["groups"].values()
    best = [min(x["train/FID[pixels-8x8]"] for x in lines_of(tmp_path / s) if "train/count" in x) for s in ("0", "1")]
    assert only["quality"]["train/FID[pixels-8x8]"]["values"] == best
    made = json.loads((tmp_path / "0/protocols.json").read_text())["train"]["pixels-8x8"]["made"]
    protocols = tmp_path / "1/protocols.json"
    protocols.write_text(protocols.read_text().replace(f'"made": {made}', f'"made": {made + 1}'))
    rejected = run_fork(tmp_path, "compare", "0", "1", "--trust", "--out", "neither")
    assert rejected.wait() == 2 and f"(generated images: {made} ≠ {made + 1})" in rejected.stderr
    protocols.write_text((tmp_path / "0/protocols.json").read_text().replace('"area to 8"', '"none"'))
    for content in (b"", (tmp_path / "0/samples/samples-000000000640.png").read_bytes()[:100]):
        (tmp_path / "0/samples/samples-000000000640.png").write_bytes(content)
        assert run_fork(tmp_path, "compare", "0", "--out", "torn").wait() == 0
        assert "samples-000000000640.png cannot be read" in (tmp_path / "torn/report.html").read_text()
    rejected = run_fork(tmp_path, "compare", "0", "1", "--trust", "--out", "neither")
    assert rejected.wait() == 2
    assert "0 and 1 were measured differently and cannot be compared (resize: area to 8 ≠ none)" in rejected.stderr


def test_every_run_has_a_row_and_a_command_that_repeats_it(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(runs)
    page = (runs / "compared/report.html").read_text()
    assert all(f"<dt>{name}</dt>" in page for name in ("single-2", "single-4", "ddp-2"))
    command = "paceline train classification --config single-4/config.toml --out single-4-again"
    spans = "".join(f"<span>{word}</span> " for word in command.split())
    assert f"<code>{spans}</code>" in page
    assert run_fork(runs, *command.split()[1:]).wait() == 0
    again, before = ([x for x in lines_of(runs / name) if "test/top1" in x] for name in ("single-4-again", "single-4"))
    assert [x["test/top1"] for x in again] == [x["test/top1"] for x in before]


def test_runs_keep_the_names_that_the_user_gave_them(runs: Path) -> None:
    words = (runs / "compared/report.md").read_text()
    assert "| run | strategy | seeds | test top-1, % |" in words
    assert "| single-2, single-4 | single | 2 |" in words and "| ddp-2 | ddp × 2 | 1 |" in words.replace("**", "")


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0.13, 0.97), (3, 3), (-5, 12_000), (0, 1e-6)])
def test_a_plot_has_few_tick_marks_and_they_cover_the_range(low: float, high: float) -> None:
    found = ticks(low, high)
    assert found[0] <= low and found[-1] >= high and 2 <= len(found) <= 8


def test_labels_in_a_plot_are_escaped_and_no_line_hides_another() -> None:
    series = [Series(label, [(0, 1), (3_000_064, 2)], "c0") for label in ('"<script>', "the same")]
    drawn = lines("<b>", "x", "y", series)
    assert "<b>" not in drawn and "<script>" not in drawn and "the same: 2 at 3,000,064 x" in drawn
    widths = [float(width) for width in re.findall(r"stroke-width:([\d.]+)", drawn)]
    assert widths[0] > widths[1] > 0, "lines that coincide are all visible"
