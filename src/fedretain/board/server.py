"""Starting and ending the board: its address, what is said about it, Ctrl-C."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
from pathlib import Path

from fedretain.board.listing import Listing
from fedretain.errors import ConfigError, MissingExtraError, RunError
from fedretain.report.figures import graph_objects

HOST = "127.0.0.1"
PORT = 8100
_SECONDS_TO_END = 2


class Board:
    """A board that has its address but does not answer yet; ``serve`` makes it."""

    def __init__(self, listing: Listing, bound: socket.socket, host: str) -> None:
        import uvicorn

        from fedretain.board.app import LOOPBACK_NAMES, make_app

        self.listing = listing
        self.exposed = not _is_loopback(host)
        """Whether other machines may reach it."""
        named = f"[{host}]" if ":" in host else host
        self.address = f"http://{named}:{bound.getsockname()[1]}/"
        names = None if self.exposed else LOOPBACK_NAMES | {named.lower()}
        config = uvicorn.Config(
            make_app(listing, only_hosts=names),
            log_config=None,
            log_level="warning",
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            timeout_graceful_shutdown=_SECONDS_TO_END,
        )
        self._bound = bound
        self._server = uvicorn.Server(config)

    def serve(self) -> None:
        """Answer until Ctrl-C, or until ``stop`` is called from another thread."""
        with self._bound, contextlib.suppress(KeyboardInterrupt):
            self._server.run(sockets=[self._bound])

    def stop(self) -> None:
        """Let ``serve`` return."""
        self._server.should_exit = True


def open_board(folder: str | Path, *, host: str = HOST, port: int = PORT) -> Board:
    """Take an address and get ready to show the runs below a folder; port 0 takes any free one."""
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(error.name or "starlette", "board", "the board") from error
    graph_objects()  # says how to install plotly where it is missing
    folder = Path(folder)
    if not folder.is_dir():
        raise RunError(
            f"no folder at {folder}: give the folder that holds run directories, "
            "such as runs/ after 'fedretain run experiment.yaml'"
        )
    return Board(Listing(folder), _bind(host, port), host)


def _bind(host: str, port: int) -> socket.socket:
    if not 0 <= port <= 65535:
        raise ConfigError(f"--port {port}: a port is a number from 0 to 65535 (0 takes a free one)")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise RunError(
                f"port {port} of {host} is in use, perhaps by another board; "
                "end that one or choose another port: --port 0 takes a free one"
            ) from None
        raise RunError(f"--host {host} --port {port}: cannot be used ({error.strerror}); choose others") from None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
