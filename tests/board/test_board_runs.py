"""The board shows states, curves, settings and samples from run files, even while the runs change."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_runs import line, make_run
from PIL import Image
from serving import Served, serve

from paceline.board.files import RemoteFiles, open_files
from paceline.board.gallery import Gallery
from paceline.board.metrics import CAPACITY, LARGE, MAX_NAMES, MetricsReader, Series
from paceline.board.run import make_row, tail
from paceline.core.errors import UserError
from paceline.runs.folder import RunFolder


def gallery_of(root: Path) -> Gallery:
    """Return the runs in a folder, read in this process."""
    gallery = Gallery(open_files(str(root)))
    gallery.refresh()
    return gallery


def listed(root: Path) -> dict[str, Any]:
    """Return the summary of each run in a folder by name."""
    return {run["name"]: run for run in gallery_of(root).summaries().runs}  # type: ignore[misc]


def test_run_states_are_read_only_from_files(board: Served) -> None:
    runs = board.runs()
    states = {name: run["state"] for name, run in runs.items()}
    assert states["finished"] == states["nested/deeper/run"] == "finished"
    assert states["stopped"] == "stopped"
    assert states["failed"] == "failed" and runs["failed"]["reason"] == "ValueError: too many pigeons"
    assert states["killed"] == "failed" and "without reporting why" in runs["killed"]["reason"]
    assert states["elsewhere"] == "running"  # the files are recent, so another machine may be training this run
    assert states["silent"] == "silent"
    assert states["private"] == "unknown"  # the run has no status file, and no process holds its lock


def test_a_run_is_listed_once_whatever_links_lead_to_it(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "deep" / "one")
    make_run(tmp_path / "runs" / ".store" / "hidden")
    (tmp_path / "runs" / "a-latest").symlink_to("deep/one")
    (tmp_path / "runs" / "deep" / "loop").symlink_to("..")
    (tmp_path / "runs" / "shown").symlink_to(".store/hidden")
    assert listed(tmp_path / "runs").keys() == {"deep/one", "shown"}


def test_the_log_tail_is_from_the_rank_that_failed(board: Served) -> None:
    assert board.runs()["failed"]["log_tail"][-1] == "ValueError: too many pigeons"
    assert board.json(f"/api/runs/{board.runs()['failed']['id']}/log?rank=1")["ranks"] == [0, 1]


def test_a_locked_run_is_running_and_the_board_never_blocks_a_run_from_starting(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "runs" / "one", state="running", host=os.uname().nodename)
    run = RunFolder(folder)
    run.claim()
    with serve(tmp_path / "runs") as board:
        assert board.runs()["one"]["state"] == "running"
        run.release()
        board.wait_for("one", lambda one: one["state"] == "failed")
        with (folder / ".lock").open() as reader:
            fcntl.flock(reader, fcntl.LOCK_SH)
            with pytest.raises(UserError, match="in use"):  # the run folder counts as in use while its lock is held
                RunFolder(folder).claim()
        for _ in range(200):  # the board keeps polling but never blocks the run
            run.claim()
            run.release()


def test_a_run_records_how_it_ends(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.claim()
    folder.end("failed", "before it had begun")
    assert not (tmp_path / "run" / "status.json").exists()
    folder.begin(640)
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "running"
    folder.end("failed", "two\nlines and s3://me:hunter2@bucket")
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (
        status["total_images"] == 640 and status["reason"].startswith("two lines") and "hunter2" not in status["reason"]
    )
    folder.end("finished")
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "failed"
    folder.release()


def test_curves_include_the_spread_across_ranks_and_the_time_breakdown(board: Served) -> None:
    run = board.runs()["finished"]
    assert run["images"] == 50 and run["total_images"] == 100 and run["time_split"] == {"step": 10.0}
    answer = board.json(f"/api/series?run={run['id']}&name=net/loss&name=spread/net/loss&name=no/such")
    loss, spread = answer["series"]
    assert loss["images"] == [10, 20, 30, 40, 50] and loss["seconds"] == [1, 2, 3, 4, 5]
    assert loss["mean"] == loss["low"] == loss["high"] == pytest.approx([1, 1 / 2, 1 / 3, 1 / 4, 1 / 5])
    assert spread["mean"] == pytest.approx([0.1] * 5)
    body = board.ask(f"/api/series?run={run['id']}&name=net/loss&format=binary").body
    (length,) = struct.unpack("<I", body[:4])
    header = json.loads(body[4 : 4 + length])
    numbers = np.frombuffer(body[4 + length :], "<f4").reshape(len(header["rows"]), -1)
    assert header["series"][0]["points"] == 5
    assert numbers[header["rows"].index("mean")] == pytest.approx(loss["mean"])


def test_the_time_breakdown_counts_an_evaluation_once(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", lines=1)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(line(10, validation__top1=50.0, time__evaluation_seconds=3.0))
        file.write(line(20, net__loss=0.5, time__step_seconds=2.0, time__evaluate_seconds=3.0))
    assert listed(tmp_path)["run"]["time_split"] == {"step": 4.0, "evaluation": 3.0}


def test_broken_lines_are_skipped_and_counted(board: Served) -> None:
    run = board.runs()["broken"]
    assert run["broken_lines"] == 6 and run["lines"] == 6
    assert (
        run["last_values"]["net/loss"] == 0.5
        and "net/other" not in run["last_values"]
        and "net/big" not in run["last_values"]
    )


def test_metrics_beyond_the_maximum_number_are_left_out_and_reported(tmp_path: Path) -> None:
    make_run(tmp_path / "few")
    with (make_run(tmp_path / "many") / "metrics.jsonl").open("a") as file:
        file.write(line(60, **{f"net__metric{number}": 1.0 for number in range(MAX_NAMES)}))
    runs = listed(tmp_path)
    assert len(runs["many"]["names"]) == MAX_NAMES and runs["many"]["names_truncated"]
    assert not runs["few"]["names_truncated"]


def test_settings_and_samples_are_served(board: Served) -> None:
    runs = board.runs()
    kept = board.json(f"/api/runs/{runs['finished']['id']}/settings")
    assert kept == {"settings": {"recipe": "dcgan", "seed": 5, "lr": 0.1}, "provenance": {"torch": "2.15"}}
    resumed = board.json(f"/api/runs/{runs['stopped']['id']}/settings")["provenance"]
    assert resumed == {"torch": "2.15", "earlier.1.until_images": 100, "earlier.1.devices": "2"}
    run = runs["images"]
    assert board.json(f"/api/runs/{run['id']}/samples")["samples"] == {"samples": [0, 100, 200]}
    answer = board.ask(f"/api/runs/{run['id']}/image?name=samples&images=100")
    assert answer.headers["content-type"] == "image/png" and answer.body.startswith(b"\x89PNG")


def test_malformed_requests_cause_no_server_error(board: Served) -> None:
    run = board.runs()["finished"]["id"]
    for route in ("series", "leaderboard"):
        assert board.ask(f"/api/{route}?run=nobody").status == 404
    assert board.ask("/api/series?points=many").status == 400
    assert board.ask(f"/api/runs/{run}/log?rank=-1").status == 400
    assert board.json(f"/api/runs/{run}/log?rank=5")["text"] == ""
    assert len(board.json("/api/series?points=0&name=net/loss")["series"]) > 5


def test_the_board_follows_a_run_that_grows_is_truncated_and_disappears(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", lines=3)
    with serve(tmp_path) as board:
        assert board.runs()["run"]["lines"] == 3
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(line(40, net__loss=0.1) + '{"images": 50, "net/lo')
        grown = board.wait_for("run", lambda run: run["lines"] == 4)
        assert grown["broken_lines"] == 0  # an incomplete last line is still being written, so it does not count
        with (folder / "metrics.jsonl").open("a") as file:
            file.write('ss": 0.05}\n')
        assert board.wait_for("run", lambda run: run["lines"] == 5)["last_values"]["net/loss"] == 0.05
        shorter = "".join((folder / "metrics.jsonl").read_text().splitlines(keepends=True)[:2])
        (folder / "new").write_text(
            shorter + line(25, net__loss=9.0) * 20
        )  # simulates a resumed run: the file is truncated and then grows longer than before
        (folder / "new").replace(folder / "metrics.jsonl")
        assert board.wait_for("run", lambda run: run["lines"] == 22)["last_values"]["net/loss"] == 9.0
        make_run(tmp_path / "another")
        board.wait_for("another", lambda run: run["lines"] == 5)
        shutil.rmtree(folder)
        while "run" in board.runs():
            pass


def test_only_runs_that_have_changed_are_sent_again(tmp_path: Path) -> None:
    make_run(tmp_path / "one", state="finished")
    changing = make_run(tmp_path / "two", state="finished")
    metrics = changing / "metrics.jsonl"
    gallery = gallery_of(tmp_path)
    first = gallery.summaries()
    assert [run["name"] for run in first.runs] == ["one", "two"]
    for change in (
        lambda: metrics.write_text(metrics.read_text() + line(60, net__loss=0.1)),
        lambda: (changing / "status.json").write_text('{"state": "stopped", "since": 5}'),
        lambda: (changing / "mirror.json").write_text('{"url": "s3://b", "images": 1, "since": 1, "error": "full"}'),
        lambda: (changing / "notes.json").write_text('{"tags": ["new"], "note": ""}'),
    ):
        before = gallery.summaries().sequence
        gallery.refresh()
        assert gallery.summaries(before).runs == []
        change()
        gallery.refresh()
        later = gallery.summaries(before)
        assert [run["name"] for run in later.runs] == ["two"] and later.ids == first.ids
    shutil.rmtree(tmp_path / "one")
    gallery.refresh()
    assert gallery.summaries(later.sequence) == (later.sequence + 1, [first.ids[1]], [])


def test_the_list_of_runs_shows_how_much_of_a_large_file_has_been_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [line(i, net__loss=1.0) for i in range(20_000)]
    (make_run(tmp_path / "run") / "metrics.jsonl").write_text("".join(lines))
    gallery = Gallery(open_files(str(tmp_path)))
    monkeypatch.setattr("paceline.board.gallery.FIRST_READING_SECONDS", 0.0)
    gallery.refresh()
    next(iter(gallery.runs.values())).read_more()  # reads samples of the file
    shares = []
    for _ in range(3):
        before = gallery.summaries().sequence
        assert next(iter(gallery.runs.values())).read_more()
        shares.append(gallery.summaries(before).runs[0]["read_share"])
    assert 0 < shares[0] < shares[1] < shares[2] < 1


def test_the_board_accepts_a_single_run_or_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    make_run(tmp_path / "run")
    assert list(listed(tmp_path / "run")) == ["run"]
    assert not Gallery(open_files((tmp_path / "empty").as_uri())).summaries().runs


GOOD = line(10, net__loss=1.0) + line(20, net__loss=0.5)
STRANGE = {  # content of metrics.jsonl: number of valid lines, number of broken lines, last value of net/loss
    "NaN and infinity": (GOOD + '{"images": 30, "net/loss": NaN}\n{"images": 40, "net/loss": Infinity}\n', 2, 2, 0.5),
    "null": (GOOD + '{"images": 30, "seconds": null, "time": null, "net/loss": null}\n', 3, 0, 0.5),
    "half a line": (GOOD + '{"images": 30, "net/lo', 2, 0, 0.5),
    "byte order mark": ("\ufeff" + GOOD, 2, 0, 0.5),
    "Windows line ends": (GOOD.replace("\n", "\r\n"), 2, 0, 0.5),
    "the same position twice": (GOOD + line(20, net__loss=0.25), 3, 0, 0.25),
    "positions that decrease": (line(20, net__loss=0.5) + line(10, net__loss=1.0), 2, 0, 1.0),
    "another program": ('{"_step": 1, "loss": 0.5}\n' * 3 + '[1]\n"text"\nnull\n', 0, 6, None),
    "values that are not numbers": (
        GOOD + '{"images": 30, "net/loss": "0.1"}\n{"images": 40, "net/loss": true}\n',
        4,
        0,
        0.5,
    ),
    "huge numbers": (GOOD + f'{{"images": 30, "net/loss": {"9" * 400}, "net/other": 1e400}}\n', 3, 0, 0.5),
    "sums that overflow": (GOOD + '{"images": 30, "net/loss": 1e308, "time/step_seconds": 1e308}\n' * 3, 5, 0, 0.5),
    "nested too deeply": ("[" * 50_000 + "]" * 50_000 + "\n" + GOOD, 2, 1, 0.5),
    "the same name twice": ('{"images": 10, "net/loss": 1, "net/loss": 2}\n', 1, 0, 2.0),
    "binary": ("\0" * 5000, 0, 0, None),
    "nothing": ("", 0, 0, None),
}


def test_strange_metrics_are_read_as_far_as_possible_and_empty_files_hide_no_run(tmp_path: Path) -> None:
    for name, (content, *_) in STRANGE.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_bytes(content.encode())
    (tmp_path / "empty files").mkdir()
    for empty in ("metrics.jsonl", "config.toml", "status.json", "notes.json", "mirror.json", ".lock"):
        (tmp_path / "empty files" / empty).touch()
    gallery = gallery_of(tmp_path)
    json.dumps([make_row(run) for run in gallery.runs.values()], allow_nan=False)
    runs = {run["name"]: run for run in json.loads(json.dumps(gallery.summaries().runs, allow_nan=False))}
    for name, (_, *expected) in STRANGE.items():
        run = runs[name]
        assert [run["lines"], run["broken_lines"], run["last_values"].get("net/loss")] == expected, name
    assert runs["empty files"]["state"] == "unknown" and runs["empty files"]["lines"] == 0


def test_numbers_and_characters_that_json_cannot_contain_do_not_hide_the_runs(tmp_path: Path) -> None:
    make_run(tmp_path / "good", state="finished")
    make_run(tmp_path / "not finite", state="failed", since=float("nan"))
    make_run(tmp_path / "surrogate", state="failed", reason="\ud800", host="\ud800")
    mirror = {"url": "s3://bucket", "images": 1, "since": float("inf"), "error": "\ud800"}
    (tmp_path / "good" / "mirror.json").write_text(json.dumps(mirror))
    (tmp_path / "surrogate" / "mirror.json").write_text(json.dumps(mirror | {"since": 1.0}))
    (tmp_path / "surrogate" / "metrics.jsonl").write_text(json.dumps({"images": 1, "net/\ud800": 1e300}) + "\n")
    (tmp_path / "good" / "metrics.jsonl").write_text(
        f'{{"images": {"9" * 50}, "net/loss": 1e50}}\n{line(10, net__loss=1)}'
    )
    with serve(tmp_path) as board:  # also checks that the board prints no warning
        assert {"good", "not finite", "surrogate"} == set(board.runs())
        assert board.runs()["good"]["last_values"] == {"net/loss": 1}
        for path in ("/api/series", "/api/leaderboard"):
            assert board.json(path)
        assert board.ask("/api/series?format=binary").status == 200


def test_a_file_that_cannot_be_read_hides_no_run_and_no_setting_of_other_runs(tmp_path: Path) -> None:
    make_run(tmp_path / "good", state="finished")
    for name in ("config.toml", "status.json", "mirror.json", "notes.json"):
        (make_run(tmp_path / f"folder {name}", state="finished") / name).unlink(missing_ok=True)
        (tmp_path / f"folder {name}" / name).mkdir()
    logs = make_run(tmp_path / "failed", state="failed") / "logs"
    (logs / "rank-0.txt").mkdir(parents=True)
    (logs / "rank-1.txt").write_text("too many pigeons\n")
    locked = make_run(tmp_path / "locked", lines=2000, state="failed")
    (locked / "logs").mkdir()
    (locked / "logs" / "rank-0.txt").write_text("a log\n")
    for file in (*locked.glob("*.*"), locked / "logs" / "rank-0.txt"):
        file.chmod(0)  # no effect if the test runs as root
    with serve(tmp_path) as board:
        answer = board.json("/api/runs")
        runs = {run["name"]: run for run in answer["runs"]}
        assert not answer["error"] and len(runs) == 7 and runs["good"]["state"] == "finished"
        assert runs["failed"]["log_tail"] == ["too many pigeons"]
        assert len(board.json("/api/leaderboard")["rows"]) == 7
        for name in ("locked", "failed"):
            assert board.json(f"/api/runs/{runs[name]['id']}/log?rank=0")["rank"] == 0
            assert board.json(f"/api/runs/{runs[name]['id']}/log?rank=0&find=log")["rank"] == 0
            assert "settings" in board.json(f"/api/runs/{runs[name]['id']}/settings")


def test_runs_in_a_folder_that_is_named_like_a_part_of_a_run_are_found(tmp_path: Path) -> None:
    name = "checkpoints"
    make_run(tmp_path / "project" / name / "first")
    make_run(tmp_path / name)
    inner = make_run(tmp_path / "run") / name / "0001"
    inner.mkdir(parents=True)
    (inner / "status.json").touch()  # the folders of a run are not searched
    gallery = gallery_of(tmp_path)
    assert {run.name for run in gallery.runs.values()} == {f"project/{name}/first", name, "run"}


def test_folders_beyond_the_limit_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(4):
        make_run(tmp_path / f"run-{number}")
    for limit, num_runs, truncated in ((5, 4, False), (4, 3, True)):  # the root folder counts too
        monkeypatch.setattr("paceline.board.gallery.MAX_FOLDERS", limit)
        gallery = gallery_of(tmp_path)
        assert (len(gallery.runs), gallery.truncated) == (num_runs, truncated)


def test_a_remote_folder_is_read_like_a_local_one(root: Path) -> None:
    import fsspec

    storage = fsspec.filesystem("memory")
    for name in ("finished", "failed", "images", "broken", "with spaces"):
        for file in (root / name).rglob("*"):
            if file.is_file():
                storage.pipe_file(f"/bucket/runs/{name}/{file.relative_to(root / name)}", file.read_bytes())
    gallery = Gallery(RemoteFiles(storage, "/bucket/runs", "memory://bucket/runs"))
    gallery.refresh()
    runs = {run.name: run for run in gallery.runs.values()}
    assert runs.keys() == {"finished", "failed", "images", "broken", "with spaces"}
    assert runs["finished"].summary()["lines"] == 5 and runs["broken"].metrics.broken == 6
    assert runs["images"].samples() == {"samples": [0, 100, 200]}
    with Image.open(root / "images" / "samples" / "samples-000000000100.png") as local:
        assert runs["images"].sample("samples", 100).startswith(b"\x89PNG") and local.size == (8, 8)
    assert runs["failed"].log_tail[-1] == "ValueError: too many pigeons"
    more = storage.cat_file("/bucket/runs/finished/metrics.jsonl") + line(60, net__loss=0.01).encode()
    storage.pipe_file("/bucket/runs/finished/metrics.jsonl", more)
    gallery.refresh()
    assert runs["finished"].summary()["last_values"]["net/loss"] == 0.01


def test_a_storage_failure_is_reported_and_the_board_keeps_running(root: Path) -> None:
    class Failing:
        def invalidate_cache(self) -> None: ...

        def ls(self, path: str, detail: bool) -> None:
            raise PermissionError("Access Denied for s3://key:hunter2@bucket")

    gallery = Gallery(RemoteFiles(Failing(), "bucket", "s3://bucket"))
    gallery.start()
    gallery.wait_until_fresh()
    assert gallery.error.startswith("PermissionError: Access Denied") and "hunter2" not in gallery.error


def test_a_large_file_is_sampled_first_and_then_read_to_its_end(tmp_path: Path) -> None:
    lines = [line(i, net__loss=float(i), net__filler=0.123456789) for i in range(1, 30001)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    size = (tmp_path / "metrics.jsonl").stat().st_size
    assert size > LARGE
    reader = MetricsReader(open_files(str(tmp_path)), "")
    assert reader.advance(size)
    first = reader.table
    assert reader.read_share < 1 and 100 < first.lines < 1000
    assert first.images == 30000 and first.series["net/loss"].points()[0, 0] < 100
    while reader.advance(size):
        pass
    assert reader.read_share == 1 and reader.table.lines == 30000
    points = reader.table.series["net/loss"].points()
    assert points.shape[1] <= CAPACITY and points[4].max() == 30000 and points[3].min() == 1


@pytest.mark.parametrize("chunk", [61, 1000, 100_000])
def test_a_long_series_keeps_its_mean_and_range_for_any_chunk_size(chunk: int) -> None:
    num = 50_003
    values = np.sin(np.arange(num) / 50) + np.random.default_rng(0).normal(size=num)
    values[100:140] = np.nan
    series = Series()
    for start in range(0, num, chunk):
        part = np.arange(start, min(num, start + chunk), dtype=float)
        series.extend(part, part / 10, values[start : start + chunk])
    images, seconds, mean, low, high = series.points()
    stride = 2 ** int(np.ceil(np.log2(num / CAPACITY)))
    assert len(images) == -(-num // stride) <= CAPACITY and images[-1] == num - 1 and seconds[-1] == (num - 1) / 10
    part = values[10 * stride : 11 * stride]
    assert mean[10] == pytest.approx(np.nanmean(part)) and low[10] == np.nanmin(part) and high[10] == np.nanmax(part)
    assert series.lowest and series.lowest == (np.nanmin(values), np.nanargmin(values))
    assert series.highest and series.highest == (np.nanmax(values), np.nanargmax(values))
    assert series.values == num and series.total == pytest.approx(np.nansum(values)) and series.last == values[-1]
    assert series.points(100).shape[1] <= 100 and series.points(100)[4].max() == np.nanmax(values)


def test_a_point_without_a_finite_value_becomes_a_gap_in_the_curve() -> None:
    series = Series()
    series.extend(np.arange(3.0), np.arange(3.0), np.array([1.0, np.nan, 3.0]))
    assert np.isnan(series.points()[2]).tolist() == [False, True, False]


def test_escape_sequences_in_a_log_are_shown_escaped(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "finished", tmp_path / "odd")
    (tmp_path / "odd" / "logs").mkdir(exist_ok=True)
    (tmp_path / "odd" / "logs" / "rank-0.txt").write_text("one\x1b[2J\ntwo\u202e\n")
    gallery = gallery_of(tmp_path)
    run = next(iter(gallery.runs.values()))
    assert tail(run.files, run.logs()[0]) == "one\\x1b[2J\ntwo\\u202e\n"
