"""uvicorn around the routes, until it is told to stop."""

from __future__ import annotations

import socket
from collections.abc import Callable

import uvicorn

from effcompile.core.errors import UsageError
from effcompile.serving.app import Service, application


def run(service: Service, host: str, port: int, ready: Callable[[str], object]) -> None:
    """Serve until interrupted; `ready` is told the address. Requests that are under way are ended then.

    Raises:
        UsageError: nothing can listen there.
    """
    config = uvicorn.Config(
        application(service), log_level="warning", lifespan="off", timeout_graceful_shutdown=2
    )
    try:
        listening = _listening(host, port)
    except OSError as error:
        raise UsageError(
            f"Nothing can listen at {host}:{port}: {error.strerror or error}. Choose another --port or "
            "--host."
        ) from error
    with listening:
        ready(f"{host}:{listening.getsockname()[1]}")
        try:
            uvicorn.Server(config).run(sockets=[listening])
        finally:
            service.desk.close()


def _listening(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    made = socket.socket(family, kind, protocol)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(1024)
    except OSError:
        made.close()
        raise
    return made
