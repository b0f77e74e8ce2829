"""Rules of servers that only this machine may use: the port, and the requests that are refused.

A page of another site may send requests to 127.0.0.1, also under a name of its own that leads there. Its requests have
another Host or Origin than those of the server's own pages.
"""

from __future__ import annotations

import socket

from etloom.core.errors import EtloomError

HOST = "127.0.0.1"


def check_port(port: int, flag: str) -> None:
    """Raise EtloomError if no server can listen on the port; ``flag`` is the option that names it."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise EtloomError(
                f"port {port} cannot be used: {error.strerror}", remedy=f"choose another {flag} PORT"
            ) from None


def list_hosts(port: int) -> list[str]:
    """Return the Host headers that a server accepts."""
    return [f"{name}:{port}" for name in (HOST, "localhost")]


def list_origins(port: int) -> list[str]:
    """Return the Origin headers that a server accepts: those of its own pages."""
    return [f"http://{host}" for host in list_hosts(port)]
