"""The review page over HTTP: on this machine only, for who has the link, and for no other site in the same browser.

The link holds a random token; every path without it is 404. Requests must name this machine as their host (a
foreign name that resolves to 127.0.0.1 gets nothing), and those that write must come from this page (Origin) as JSON.
The page's policy (CSP) lets it load its own three files and talk to this server, nothing else.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import re
import secrets
import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from quantkit.errors import PreflightError, QuantkitError, RequestError
from quantkit.review.record import Said
from quantkit.review.session import Session

HOST = "127.0.0.1"
_LOCAL = ("127.0.0.1", "localhost")
_MOST_BODY = 64 << 10
_HERE = Path(__file__).parent
_FILES = {
    "": ("page.html", "text/html; charset=utf-8"),
    "page.css": ("page.css", "text/css; charset=utf-8"),
    "page.js": ("page.js", "text/javascript; charset=utf-8"),
}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class ReviewServer(ThreadingHTTPServer):
    """Serves one session. `url` is the link to open; `token` a fresh random one unless given; `signed` is set when
    somebody signed."""

    daemon_threads = True

    def __init__(self, session: Session, port: int = 0, token: str = "") -> None:
        """PreflightError when the port cannot be had."""
        self.session = session
        self.signed = threading.Event()
        self.token = token or secrets.token_urlsafe(24)
        try:
            super().__init__((HOST, port), _Handler)
        except (OSError, OverflowError) as error:
            raise PreflightError(
                f"cannot listen on port {port} ({error})", where=HOST, next="Choose another with --port; 0 takes any"
            ) from None

    @property
    def url(self) -> str:
        """The page's address, token included."""
        return f"http://{HOST}:{self.server_address[1]}/{self.token}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that hangs up is no error worth a traceback."""


class _Refused(Exception):
    def __init__(self, status: int, words: str) -> None:
        self.status, self.words = status, words
        super().__init__(words)


class _Handler(BaseHTTPRequestHandler):
    server: ReviewServer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "quantkit", ""
    timeout = 60

    def do_GET(self) -> None:
        """The page's three files."""
        self._answer(self._file)

    def do_POST(self) -> None:
        """What the page asks for and tells."""
        self._answer(self._call)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the link is a secret and requests tell nothing else."""

    def _answer(self, make: Callable[[str], tuple[bytes, str]]) -> None:
        status, kind = 200, "application/json"
        try:
            body, kind = make(self._path())
        except _Refused as refused:
            status, body = refused.status, _error(refused.words)
        except RequestError as error:
            status, body = 400, _error(error.line())
        except QuantkitError as error:
            status, body = 409, _error(error.line())
        except OSError as error:
            status, body = 500, _error(f"it could not be kept ({error.strerror})")
        if status >= 400:
            self.close_connection = True  # a body that was not read must not pass for the next request
        with contextlib.suppress(ConnectionError, socket.timeout):
            self.send_response(status)
            for name, value in {**_HEADERS, "Content-Type": kind, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

    def _path(self) -> str:
        """The path below the token; `_Refused` for another host, and as if nothing were here without the token."""
        if _host_name(f"//{self.headers.get('Host', '')}") not in _LOCAL:
            raise _Refused(421, "this page is for this machine only")
        token, slash, rest = self.path.partition("?")[0].removeprefix("/").partition("/")
        if not slash or not hmac.compare_digest(token.encode(), self.server.token.encode()):
            raise _Refused(404, "nothing here: open the whole link that quantkit review printed")
        return rest

    def _file(self, path: str) -> tuple[bytes, str]:
        if path not in _FILES:
            raise _Refused(404, "no such page")
        name, kind = _FILES[path]
        return (_HERE / name).read_bytes(), kind

    def _call(self, path: str) -> tuple[bytes, str]:
        origin = self.headers.get("Origin")
        if origin != f"http://{self.headers.get('Host', '')}":
            raise _Refused(403, "this request comes from another page")
        if self.headers.get_content_type() != "application/json":
            raise _Refused(415, "send JSON")
        session, given = self.server.session, self._body()
        reviewer = _text(given, "reviewer")
        match path:
            case "api/state":
                found = session.state(reviewer, more=given.get("more") is True)
            case "api/judge":
                found = session.judge(reviewer, _said(given))
            case "api/undo":
                found = session.undo(reviewer)
            case "api/sign":
                found = session.sign(reviewer)
                self.server.signed.set()
            case _:
                raise _Refused(404, "no such call")
        return json.dumps(found, ensure_ascii=False).encode(), "application/json"

    def _body(self) -> dict[str, Any]:
        length = self.headers.get("Content-Length", "")
        if not re.fullmatch("[0-9]{1,9}", length) or int(length) > _MOST_BODY:
            raise _Refused(413, f"a body has a length, at most {_MOST_BODY} bytes")
        try:
            found = json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError):
            raise _Refused(400, "not JSON") from None
        if not isinstance(found, dict):
            raise _Refused(400, "not a JSON object")
        return found


def _host_name(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _said(given: dict[str, Any]) -> Said:
    reasons = given.get("reasons", [])
    if not isinstance(reasons, list) or not all(isinstance(reason, str) for reason in reasons):
        raise _Refused(400, "reasons are a list of words")
    return Said(
        showing=_text(given, "id"),
        choice=_text(given, "choice"),  # type: ignore[arg-type]
        severity=_text(given, "severity") or "none",  # type: ignore[arg-type]
        reasons=tuple(reasons),
        comment=_text(given, "comment"),
    )


def _text(given: dict[str, Any], name: str) -> str:
    value = given.get(name, "")
    if not isinstance(value, str):
        raise _Refused(400, f"{name} is a text")
    return value


def _error(words: str) -> bytes:
    return json.dumps({"error": words}, ensure_ascii=False).encode()
