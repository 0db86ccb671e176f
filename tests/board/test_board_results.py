"""The leaderboard's rows, and the search through logs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from made_runs import SECRET, line, make_run
from serving import Served

from paceline.board import run as runs
from paceline.board.files import LocalFiles
from paceline.board.gallery import Gallery


def test_a_row_has_the_last_and_best_values_and_the_settings_of_a_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", lines=2)
    with (run / "metrics.jsonl").open("a") as file:
        for images, accuracy in ((30, 70.0), (40, 90.0), (50, 80.0)):
            file.write(line(images, validation__top1=accuracy, validation__count=10, host__cpu_percent=5))
        file.write(line(50, test__top1=85.0, test__checkpoint_images=40, time__images_per_second=900.0))
    (run / "config.toml").write_text('recipe = "dcgan"\nlr = 0.1\nlimit = inf\n[generator]\nlr = 0.3\n')
    gallery = Gallery(LocalFiles(tmp_path))
    gallery.refresh()
    (listed,) = gallery.runs.values()
    row: Any = runs.make_row(listed)
    assert row["results"]["validation/top1"] == {
        "last": 80.0,
        "lowest": 70.0,
        "lowest_at": 30,
        "highest": 90.0,
        "highest_at": 40,
    }
    assert row["results"].keys() == {"net/loss", "validation/top1", "test/top1", "time/images_per_second"}
    assert row["settings"] == {"recipe": "dcgan", "lr": 0.1, "limit": "inf", "generator.lr": 0.3}
    assert row["complete"] and row["revision"] == listed.revision


def test_a_search_finds_lines_in_all_of_a_log_and_never_reveals_credentials(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run / "logs").mkdir()
    text = "Needle at the start\n" + "hay\n" * 40_000 + f"token={SECRET} needle\n" + "a NEEDLE at the end"
    (run / "logs" / "rank-0.txt").write_text(text)
    files = LocalFiles(run)
    log = runs.log_files(files, "logs")[0]
    found = runs.search(files, log, "needle")
    assert [number for number, _ in found.matches] == [1, 40_002, 40_003]
    assert found.total == 3 and found.searched_share == 1 and SECRET not in str(found)
    assert runs.search(files, log, SECRET).total == runs.search(files, log, SECRET[:4]).total == 0
    hay = runs.search(files, log, "hay")
    assert hay.total == 40_000 and len(hay.matches) == runs.MAX_MATCHES


def test_a_line_across_two_chunks_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "CHUNK", 7)
    (tmp_path / "rank-3.txt").write_bytes(b"first line\nsecond \xff line\r\nlast")
    files = LocalFiles(tmp_path)
    entry = runs.log_files(files, "")[3]
    assert [text for _, text in runs.search(files, entry, "LINE").matches] == ["first line", "second \ufffd line"]
    assert runs.search(files, entry, "last").matches == [(3, "last")]
    monkeypatch.setattr(runs, "MAX_SEARCHED_BYTES", 10)
    assert runs.search(files, entry, "first").total == 0
    assert runs.search(files, entry, "last").searched_share == pytest.approx(10 / entry.size)


def test_log_routes_search_and_report_a_missing_rank(board: Served) -> None:
    route = f"/api/runs/{board.runs()['failed']['id']}/log?rank="
    assert board.json(f"{route}7&find=x")["text"] == ""
    assert board.json(f"{route}1&find=PIGEONS")["matches"] == [{"line": 2, "text": "ValueError: too many pigeons"}]
