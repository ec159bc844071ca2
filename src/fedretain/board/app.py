"""What the board answers: a few fixed pages, the list of runs, the report of chosen runs. It reads, and only runs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from functools import cache
from importlib.resources import files

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fedretain.board.listing import Listing, RunEntry
from fedretain.board.reporting import Reporter

MOST_COMPARED = 100
"""More runs in one page are neither readable nor quick to draw."""

LOOPBACK_NAMES = frozenset({"127.0.0.1", "localhost", "[::1]"})

# Nothing from elsewhere, and no script but the board's own, whatever text a run puts into a page. Styles may stand in
# the page because plotly and the report's legends write them there.
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}
_KINDS = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_STATIC = {
    **{name: ("fedretain.report", name) for name in ("style.css", "page.js")},
    **{name: ("fedretain.board", f"pages/{name}") for name in ("board.css", "icon.svg")},
    **{name: ("fedretain.board", f"pages/{name}") for name in ("list.js", "view.js", "follow.js", "morph.js")},
}


def make_app(listing: Listing, *, only_hosts: frozenset[str] | None = LOOPBACK_NAMES) -> ASGIApp:
    """The board as an ASGI application; ``only_hosts`` are the names under which it may be asked, None for any."""
    reporter = Reporter(listing.root)

    def known_entries(places: Sequence[str]) -> list[RunEntry]:
        """The chosen runs. A place is looked up in the list, never joined to a path: there is no way out of it."""
        entries = listing.snapshot().entries
        chosen = [entries[place] for place in dict.fromkeys(places) if place in entries]
        if not chosen:
            raise HTTPException(404)
        return chosen

    def list_page(request: Request) -> Response:
        return _page("list.html")

    def run_page(request: Request) -> Response:
        known_entries([request.path_params["place"]])
        return _page("view.html")

    def compare_page(request: Request) -> Response:
        known_entries(request.query_params.getlist("run"))
        return _page("view.html")

    def runs(request: Request) -> Response:
        snapshot = listing.snapshot()
        return _tagged(request, snapshot.tag, "application/json", lambda: snapshot.content)

    def report(request: Request) -> Response:
        places = list(dict.fromkeys(request.query_params.getlist("run")))
        if len(places) > MOST_COMPARED:
            raise HTTPException(400, f"{len(places)} runs are too many for one page; choose at most {MOST_COMPARED}")
        entries = known_entries(places)
        there = {entry.id for entry in entries}
        missing = [place for place in places if place not in there]
        tag = reporter.tag(entries, missing)
        return _tagged(request, tag, "application/json", lambda: reporter.draw(entries, missing).content)

    def static(request: Request) -> Response:
        name = request.path_params["name"]
        if name != "plotly.js" and name not in _STATIC:
            raise HTTPException(404)
        content, tag = _static(name)
        return _tagged(request, tag, _KINDS[name.rpartition(".")[2]], lambda: content)

    app = Starlette(
        routes=[
            Route("/", list_page),
            Route("/run/{place:path}", run_page),
            Route("/compare", compare_page),
            Route("/api/runs", runs),
            Route("/api/report", report),
            Route("/static/{name}", static),
        ],
        exception_handlers={HTTPException: _refusal, Exception: _failure},
    )
    app.router.redirect_slashes = False  # a place that is not in the list is not there, with or without a slash
    return _Guard(app, only_hosts)


class _Guard:
    """Around everything: only reading, only under the board's own names, and the headers of a page that trusts nobody.

    A foreign web page can make a browser ask 127.0.0.1 under the page's own name (DNS rebinding), and could then read
    the answers; the Host header gives it away.
    """

    def __init__(self, app: ASGIApp, only_hosts: frozenset[str] | None) -> None:
        self.app = app
        self.only_hosts = only_hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = [(name.encode(), value.encode()) for name, value in _HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *own]}
            await send(message)

        await self._choose(scope)(scope, receive, send_with_headers)

    def _choose(self, scope: Scope) -> ASGIApp:
        request = Request(scope)
        name, _, port = request.headers.get("host", "").rpartition(":")
        host = name if name and port.isdigit() else request.headers.get("host", "")
        if self.only_hosts is not None and host.lower() not in self.only_hosts:
            return Response("The board answers only under the address that it printed.\n", 421, media_type="text/plain")
        if request.method not in ("GET", "HEAD"):
            return Response("The board only shows runs: GET.\n", 405, {"allow": "GET, HEAD"}, media_type="text/plain")
        return self.app


def _page(name: str, status: int = 200) -> Response:
    content = files("fedretain.board").joinpath(f"pages/{name}").read_bytes()
    return Response(content, status, {"cache-control": "no-store"}, media_type="text/html")


@cache
def _static(name: str) -> tuple[bytes, str]:
    if name == "plotly.js":
        from plotly.offline import get_plotlyjs

        content = get_plotlyjs().encode()
    else:
        package, path = _STATIC[name]
        content = files(package).joinpath(path).read_bytes()
    return content, hashlib.blake2b(content, digest_size=12).hexdigest()


def _tagged(request: Request, tag: str, kind: str, content: Callable[[], bytes]) -> Response:
    """The content, or 304 when the asker has it already; then it is not even made."""
    headers = {"etag": f'"{tag}"', "cache-control": "no-cache"}
    if request.headers.get("if-none-match") == f'"{tag}"':
        return Response(None, 304, headers)
    return Response(content(), 200, headers, media_type=kind)


def _refusal(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 404
    if request.url.path.startswith("/api/"):
        detail = error.detail if isinstance(error, HTTPException) else ""
        return Response(json.dumps({"error": detail}), status, media_type="application/json")
    return _page("missing.html", status)


def _failure(request: Request, error: Exception) -> Response:
    """The traceback goes to the terminal of the board, not into the page."""
    return Response("The board could not answer; its terminal says why.\n", 500, media_type="text/plain")
