"""`paceline board`: serve a live page that shows local or remote runs."""

from __future__ import annotations

import os
import secrets
import socket
from contextlib import suppress
from ipaddress import ip_address
from urllib.parse import quote

from paceline.board.files import open_files
from paceline.board.gallery import Gallery
from paceline.core.errors import UserError, install_extra
from paceline.core.text import print_line

DEFAULT_PORT = 6116


def board(where: str, host: str, port: int | None, edit: bool | None = None) -> int:
    """Serve the board until the user presses Ctrl-C; return the exit code.

    `edit` allows the page to edit tags and notes. If it is None, only a board on a loopback address allows it.
    """
    files = open_files(where)
    try:
        import uvicorn

        from paceline.board.server import NoteEditor, make_app
    except ImportError as error:
        raise UserError(f"the board needs {error.name}; install it with: {install_extra('board')}") from None
    gallery = Gallery(files)
    listener = _listen(host, port)
    address, port = listener.getsockname()[:2]
    token = secrets.token_urlsafe(24)
    private = ip_address(address.partition("%")[0]).is_loopback
    editor = NoteEditor(gallery.files, allowed=private if edit is None else edit)
    if edit and editor.obstacle:
        raise UserError(f"--edit: {gallery.files.shown}: {editor.obstacle}; omit --edit")
    app = make_app(gallery, token, host, port, editor)
    gallery.start()
    shown = f"[{address}]" if ":" in address else address
    print_line(f"board for {gallery.files.shown}: http://{shown}:{port}/?token={quote(token)}")
    if not private:
        can = "see the runs" if editor.obstacle else "see the runs and edit their notes"
        print(
            f"--host {host}: the board is reachable from other machines without encryption; "
            f"anyone with the URL can {can}",
            flush=True,
        )
    # The access log is disabled because its lines would contain the token. Warnings are disabled because port scanners
    # and WebSocket clients, such as some browser extensions, would fill the terminal with them.
    settings = uvicorn.Config(
        app, log_level="error", access_log=False, lifespan="off", ws="none", timeout_graceful_shutdown=1
    )
    with suppress(KeyboardInterrupt):  # re-raised by uvicorn after it has closed all connections
        uvicorn.Server(settings).run(sockets=[listener])
    return 0


def _listen(host: str, port: int | None) -> socket.socket:
    """Return a listening socket.

    If `port` is None, use the default port, or any free port if the default port is in use.
    """
    for candidate in (DEFAULT_PORT, 0) if port is None else (port,):
        try:
            family, _, _, _, address = socket.getaddrinfo(host, candidate, type=socket.SOCK_STREAM)[0]
            return socket.create_server(address, family=family, backlog=128)
        except (socket.gaierror, UnicodeError) as error:
            raise UserError(f"--host {host}: {getattr(error, 'strerror', 'not a host name')}") from None
        except OSError as error:
            problem = os.strerror(error.errno or 0)
    flag = f"--port {port}" if port is not None else f"--host {host}"
    raise UserError(f"{flag}: {problem}; use --port 0 to pick a free port")
