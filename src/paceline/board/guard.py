"""Access control: reject requests without the token and requests from other sites.

The token is passed in the printed URL, in a cookie that the first response sets, or in `Authorization: Bearer TOKEN`.
The Host header is checked because another site could resolve its own name to this machine (DNS rebinding). The Origin
header is checked because browsers also send cookies with requests made by other pages. A request that writes must have
the board's own Origin and the cookie, or the `Authorization` header, which no other page can send.
"""

from __future__ import annotations

import ipaddress
import secrets
import socket
from urllib.parse import urlsplit

from starlette.datastructures import MutableHeaders
from starlette.requests import HTTPConnection
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

READING = {"GET", "HEAD"}
LOOPBACK_NAMES = {"localhost", "127.0.0.1", "::1"}
PROTECTION = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}


class Guard:
    """Checks the token and the origin of every request, including requests for unknown routes."""

    def __init__(self, app: ASGIApp, token: str, host: str, port: int) -> None:
        self._app, self._token, self._cookie = app, token, f"paceline_board_{port}"
        self._names = LOOPBACK_NAMES | {host.lower()}
        self._any_address = _is_address(host) and ipaddress.ip_address(host).is_unspecified
        if self._any_address:
            self._names |= {socket.gethostname().lower(), socket.getfqdn().lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # ignore other protocols, because the board has only HTTP routes
        request = HTTPConnection(scope)
        rejection = self._rejection(request)

        async def send_protected(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(PROTECTION)
                headers.setdefault("cache-control", "no-store")
                if rejection is None and "token" in request.query_params:
                    value = f"{self._cookie}={self._token}; Path=/; HttpOnly; SameSite=Strict"
                    headers.append("set-cookie", value)
            await send(message)

        await (rejection or self._app)(scope, receive, send_protected)

    def _rejection(self, request: HTTPConnection) -> PlainTextResponse | None:
        headers = request.headers
        in_url = self._is_token(request.query_params.get("token", ""))
        in_cookie = self._is_token(request.cookies.get(self._cookie, ""))
        as_bearer = self._is_token(headers.get("authorization", "").removeprefix("Bearer "))
        if not (in_url or in_cookie or as_bearer):
            return PlainTextResponse("Access denied: open the URL that `paceline board` printed.\n", 401)
        host, origin, site = headers.get("host", ""), headers.get("origin"), headers.get("sec-fetch-site")
        if not self._is_own_name(host):
            return PlainTextResponse("Unknown host name: open the URL that `paceline board` printed.\n", 403)
        if origin is not None and origin.lower().partition("://")[2] != host.lower():
            return PlainTextResponse("Cross-origin requests are not allowed.\n", 403)
        if site == "cross-site" and headers.get("sec-fetch-mode") != "navigate":
            return PlainTextResponse("Cross-site requests are not allowed.\n", 403)
        # The token in a URL is not enough to write, because a URL is easy to pass on by mistake.
        from_page = in_cookie and origin is not None and site in (None, "same-origin")
        if request.scope["method"] not in READING and not (as_bearer or from_page):
            return PlainTextResponse("Write requests need an Origin and the cookie, or an Authorization header.\n", 403)
        return None

    def _is_token(self, text: str) -> bool:
        return secrets.compare_digest(text.encode(), self._token.encode())

    def _is_own_name(self, host: str) -> bool:
        """Return whether a Host header contains one of this machine's names.

        Any port is allowed, because an SSH tunnel may use a different port.
        """
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        return name in self._names or (self._any_address and _is_address(name))


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
