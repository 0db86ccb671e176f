"""The board rejects requests without the token or from other sites, and reads nothing outside its folder."""

from __future__ import annotations

import socket
from pathlib import Path
from urllib.parse import quote

import pytest
from listeners import listeners
from made_runs import OUTSIDE, SECRET
from serving import Served, serve

from paceline.cli.app import run

PAGE = Path(__file__).resolve().parents[2] / "src" / "paceline" / "board" / "page"
ROUTES = [
    "/",
    *[f"/page/{file.name}" for file in sorted(PAGE.iterdir())],
    "/api/runs",
    "/api/series",
    "/api/leaderboard",
    "/api/runs/x/notes",
    "/api/runs/x/settings",
    "/api/runs/x/samples",
    "/api/runs/x/image?name=samples&images=0",
    "/api/runs/x/log",
    "/nowhere",
    "/favicon.ico",
]


def test_every_route_returns_401_without_a_token_or_with_a_wrong_one(board: Served) -> None:
    for path in ROUTES:
        assert board.ask(path, token=False).status == 401, path
        assert board.ask(path, token=False, headers={"Authorization": "Bearer wrong"}).status == 401, path
        assert board.ask(path, token=False, headers={"Cookie": f"paceline_board_{board.port}=é"}).status == 401, path
        joint = "&" if "?" in path else "?"
        assert board.ask(f"{path}{joint}token=wrong", token=False).status == 401, path
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "HEAD"):
        assert board.ask("/api/runs", token=False, method=method).status == 401, method


def test_the_token_in_the_url_becomes_an_http_only_cookie(board: Served) -> None:
    first = board.ask(f"/?token={board.token}", token=False)
    assert first.status == 200 and b"<!doctype html>" in first.body
    cookie = first.headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=Strict" in cookie
    assert board.ask("/page/main.js", token=False, headers={"Cookie": cookie.partition(";")[0]}).status == 200


OWN = "127.0.0.1:{port}"
CROSS_SITE = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}


def test_requests_from_other_sites_or_for_other_host_names_are_rejected(board: Served) -> None:
    foreign = ("evil.example", "evil.example:{port}", "127.0.0.1.evil.example", "", "[::1", "10.0.0.1")
    origins = ("http://evil.example", "null", "http://127.0.0.1:1", "", "http://[", "http://[v1.x]", "//\u2100.example")
    rejected = [{"Host": host} for host in foreign] + [{"Host": OWN, "Origin": origin} for origin in origins]
    accepted = [{"Host": host} for host in ("localhost:{port}", "127.0.0.1:9999", "[::1]:{port}")]  # through a tunnel
    accepted += [{"Host": OWN, "Origin": f"http://{OWN}"}]
    for headers in [*rejected, CROSS_SITE, {"Host": "[", "Origin": "http://["}, *accepted]:
        sent = {
            name: text.replace("{port}", str(board.port)).encode().decode("latin-1") for name, text in headers.items()
        }
        assert board.ask("/api/runs", headers=sent).status == (200 if headers in accepted else 403), headers
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        assert board.ask("/api/runs", method=method).status == 405, method


def test_responses_forbid_third_party_code_and_caching(board: Served) -> None:
    headers = board.ask("/").headers
    assert "script-src 'self'" in headers["content-security-policy"]
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff" and headers["referrer-policy"] == "no-referrer"
    assert board.ask("/api/runs").headers["cache-control"] == "no-store"


def test_websocket_clients_and_invalid_requests_print_nothing(board: Served) -> None:
    """`serve` checks at the end that the board has printed nothing to stderr."""
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
    for token in (True, False):
        board.ask("/", token=token, headers=upgrade | {"Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ=="})
    for content in (b"\x16\x03\x01\x02\x00\x01\x00", b"nonsense\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", board.port), timeout=60) as connection:
            connection.sendall(content)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(1000):
                pass
    assert board.ask("/api/runs").status == 200


def test_no_url_escapes_the_folder(board: Served) -> None:
    for path in (
        *("/page/../server.py", "/page/..%2fserver.py", "/page/%2e%2e/server.py", "/page//etc/passwd"),
        *("/../../../../etc/passwd", "/api/runs/../../outside/settings", "/api/runs/..%2f..%2foutside/settings"),
        "/api/runs/%00/settings",
    ):
        answer = board.ask(path)
        assert answer.status == 404 and b"root:" not in answer.body and OUTSIDE.encode() not in answer.body, path
    run = board.runs()["images"]["id"]
    for name in ("../../../outside/secret", "..", "/etc/passwd", "samples/../samples", ""):
        assert board.ask(f"/api/runs/{run}/image?name={name}&images=0").status == 404, name
    for images in ("-1", "1e3", "", "٣", "9" * 40):
        answer = board.ask(f"/api/runs/{run}/image?name=samples&images={quote(images)}")
        assert answer.status in (400, 404), images


def test_pipes_and_symlinks_that_lead_outside_the_folder_are_ignored(board: Served) -> None:
    runs = board.runs()
    assert "a link to outside" not in runs
    run = runs["leads out"]
    assert board.json(f"/api/runs/{run['id']}/settings")["settings"] == {}
    assert board.json(f"/api/runs/{run['id']}/samples")["samples"] == {}
    log = board.json(f"/api/runs/{run['id']}/log?rank=0")
    assert log == {"ranks": [], "rank": 0, "text": ""}
    assert run["last_values"]["net/loss"] == pytest.approx(0.2)  # symlinks within the folder are followed


def test_credentials_are_hidden(board: Served) -> None:
    runs = board.runs()
    shown = board.json(f"/api/runs/{runs['private']['id']}/settings")["settings"]
    assert shown["generator.lr"] == 0.3
    assert {"mirror", "api_key", "data_root"} <= shown.keys()
    log = board.json(f"/api/runs/{runs['failed']['id']}/log?rank=0")["text"]
    assert "Connection closed" in log
    assert SECRET not in str(shown) + log


def test_the_board_listens_on_loopback_only_and_executes_no_name_of_a_run(board: Served, root: Path) -> None:
    assert not list(root.rglob("pwned"))
    assert listeners(board.process.pid) == {("127.0.0.1", board.port)}


def test_a_board_on_a_public_address_warns_is_read_only_and_rejects_unknown_host_names(root: Path) -> None:
    with serve(root, "--host", "0.0.0.0") as wide:
        assert "reachable from other machines" in wide.process.stdout.readline()  # type: ignore[union-attr]
        assert wide.ask("/api/runs", headers={"Host": "10.0.0.1:80"}).status == 200
        assert wide.ask("/api/runs", headers={"Host": "evil.example"}).status == 403
        assert "read-only" in wide.json("/api/runs")["read_only"]
        assert wide.ask("/api/runs", token=False).status == 401


def test_user_errors_print_one_line(
    board: Served, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments, message in (
        (["no-such-folder"], "no-such-folder: no such folder"),
        (["nope://bucket"], "nope://bucket: "),
        (["simplecache::file:///etc"], "use a single URL"),
        ([".", "--port", "70000"], "'--port'"),
        ([".", "--port", "ninety"], "'--port'"),
        ([".", "--host", "a..b"], "--host a..b: not a host name"),
        ([".", "--host", "no.such.host.invalid"], "--host no.such.host.invalid: "),
        ([str(root), "--port", str(board.port)], f"--port {board.port}: "),
    ):
        assert run(["board", *arguments]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1, error
