"""Tags and notes: who may write them, what is written, and that nothing outside the run folder is touched."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from made_runs import make_run
from serving import Answer, Served, serve

from paceline.board.notes import MAX_NOTE_LENGTH, Notes, check_notes, write_notes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("notes")
    for name in ("one", "two", "deep/er/three"):
        make_run(root / name, state="finished")
    return root


@pytest.fixture(scope="module")
def notes_board(folder: Path) -> Iterator[Served]:
    with serve(folder) as board:
        yield board


def put(board: Served, run: str, content: Any, headers: dict[str, str] | None = None, **options: Any) -> Answer:
    """Send notes for a run as JSON."""
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    path = f"/api/runs/{board.runs()[run]['id']}/notes"
    return board.ask(
        path, method="PUT", body=body, headers={"Content-Type": "application/json"} | (headers or {}), **options
    )


def test_tags_and_a_note_are_kept_in_the_run_folder(notes_board: Served, folder: Path) -> None:
    for name in ("one", "deep/er/three"):
        answer = put(notes_board, name, {"tags": ["baseline", "äé", "baseline"], "note": " two\nlines \x1b[2J"})
        assert answer.status == 200, answer
        kept = json.loads((folder / name / "notes.json").read_text())
        assert kept == {"tags": ["baseline", "äé"], "note": "two\nlines \\x1b[2J"}
        run = notes_board.runs()[name]
        assert run["tags"] == ["baseline", "äé"] and run["note"].startswith("two\n")
        assert not list((folder / name).glob(".*.writing"))


def test_notes_that_were_changed_in_the_meantime_are_not_overwritten(notes_board: Served, folder: Path) -> None:
    assert put(notes_board, "two", {"tags": [], "note": "first"}).status == 200
    answer = put(notes_board, "two", {"tags": [], "note": "second"})  # still based on the state without notes
    assert answer.status == 409 and b"changed" in answer.body
    version = notes_board.runs()["two"]["notes_version"]
    assert put(notes_board, "two", {"tags": [], "note": "second", "notes_version": version}).status == 200
    (folder / "two" / "notes.json").write_text('{"tags": ["by-hand"], "note": ""}')
    notes_board.wait_for("two", lambda run: run["tags"] == ["by-hand"])


def test_invalid_notes_are_rejected_with_a_reason(notes_board: Served) -> None:
    many, long = [f"t{i}" for i in range(21)], "x" * (MAX_NOTE_LENGTH + 1)
    contents: list[Any] = [b"not json", [1], b"[" * 50_000]
    contents += [{"tags": tags, "note": ""} for tags in ("x", ["two words"], ["x" * 41], many)]
    for content in [*contents, {"tags": [], "note": long}]:
        answer = put(notes_board, "one", content)
        assert answer.status == 400 and answer.body, content
    assert put(notes_board, "one", b" " * 70_000).status == 413


def test_only_the_page_or_a_program_with_the_token_can_write(notes_board: Served) -> None:
    own = f"127.0.0.1:{notes_board.port}"
    cookie = {"Cookie": f"paceline_board_{notes_board.port}={notes_board.token}", "Host": own}
    notes = {"tags": [], "note": "from the page", "notes_version": "wrong"}

    def status(headers: dict[str, str]) -> int:
        return put(notes_board, "one", notes, headers, token=False).status

    assert status(cookie | {"Origin": f"http://{own}"}) == 409  # accepted, but the version is wrong
    assert status(cookie | {"Origin": f"http://{own}", "Sec-Fetch-Site": "same-origin"}) == 409
    assert status(cookie) == 403  # no Origin
    assert status(cookie | {"Origin": "http://evil.example"}) == 403
    assert status(cookie | {"Origin": f"http://{own}", "Sec-Fetch-Site": "same-site"}) == 403
    assert status({"Origin": f"http://{own}", "Host": own}) == 401
    assert put(notes_board, "one", notes, {"Host": "evil.example"}).status == 403
    assert put(notes_board, "one", notes, {"Content-Type": "text/plain"}).status == 415
    run = notes_board.runs()["one"]["id"]
    by_url = f"/api/runs/{run}/notes?token={notes_board.token}"
    headers = {"Content-Type": "application/json", "Host": own, "Origin": f"http://{own}"}
    assert notes_board.ask(by_url, token=False, method="PUT", body=b"{}", headers=headers).status == 403


def test_a_read_only_board_writes_nothing(folder: Path) -> None:
    with serve(folder, "--read-only") as board:
        answer = put(board, "one", {"tags": ["x"], "note": ""})
        assert answer.status == 403 and b"--edit" in answer.body


def test_notes_never_follow_a_link_out_of_the_run_folder(tmp_path: Path) -> None:
    outside = tmp_path / "outside.json"
    outside.write_text("untouched")
    root = tmp_path / "runs"
    run = make_run(root / "run")
    (run / "notes.json").symlink_to(outside)
    write_notes(root, "run", Notes(("tag",), "note"))
    assert outside.read_text() == "untouched"
    assert not (run / "notes.json").is_symlink() and json.loads((run / "notes.json").read_text())["tags"] == ["tag"]
    (tmp_path / "elsewhere").mkdir()
    (root / "link").symlink_to(tmp_path / "elsewhere")
    for name in ("link", "link/deeper", "../elsewhere"):
        with pytest.raises(OSError):
            write_notes(root, name, Notes(("tag",), ""))
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_damaged_notes_file_counts_as_empty() -> None:
    contents = (b"", b"\xff", b"[]", b'{"tags": 1, "note": []}', b'{"tags": [[]], "note": null}', b"[" * 99_999)
    for content in (*contents, b'{"tags": ["\x00"]}'):
        notes = Notes.parse(content)
        assert notes.tags == () and notes.text == "" and notes.version, content


def test_notes_read_from_a_file_are_shortened_and_escaped() -> None:
    notes = Notes.parse(json.dumps({"tags": ["x" * 99, "a\nb"] * 30, "note": "\u202e" + "y" * 9999}).encode())
    assert len(notes.tags) == 20 and len(notes.tags[0]) == 40 and notes.tags[1] == "a\\x0ab"
    assert len(notes.text) == MAX_NOTE_LENGTH and notes.text.startswith("\\u202e")
    again = check_notes(json.loads(Notes(("a", "b"), "text").to_json()))
    assert (again.tags, again.text) == (("a", "b"), "text")
