"""uvicorn around the routes, until it is told to stop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import uvicorn

from effcompile.core.errors import UsageError
from effcompile.serving.app import Service, application

#: Seconds that requests under way have to end by themselves, and that their clients have to be told after.
_GRACE, _TOLD = 2, 3


class _Server(uvicorn.Server):
    """Told to stop, it ends what is still under way in the protocol's words: uvicorn itself cancels it, which
    is "Internal Server Error" to a client and a traceback here.
    """

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        ending = asyncio.ensure_future(self._end_late())
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()

    async def _end_late(self) -> None:
        await asyncio.sleep(_GRACE)
        await asyncio.to_thread(self._service.desk.close)


def run(service: Service, host: str, port: int, ready: Callable[[str], object]) -> None:
    """Serve until interrupted; `ready` is told the address. Requests that are under way are ended then.

    Raises:
        UsageError: nothing can listen there.
    """
    config = uvicorn.Config(
        application(service),
        log_level="warning",
        lifespan="off",
        timeout_graceful_shutdown=_GRACE + _TOLD,
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
            _Server(config, service).run(sockets=[listening])
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
