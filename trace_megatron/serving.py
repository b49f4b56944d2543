"""What the HTTP servers of this package share: serve until a signal, and end with the process that owns them."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import threading

from aiohttp import web

from trace_megatron.errors import UserError

_GRACE_S = 10.0
"""Between the signal to end with the owner and the end."""
_SHUTDOWN_S = 1.0
"""For open requests to finish."""
_BACKLOG = 1024
"""Connections that wait to be accepted: hundreds of episodes begin at once."""


async def serve(app: web.Application, host: str, port: int, *, cancel_abandoned: bool = False) -> None:
    """Serve until SIGTERM or SIGINT; the first line on stdout says where.

    ``cancel_abandoned``: cancel a request whose client has hung up. Raises UserError where the port is not to be had.
    """
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=cancel_abandoned, shutdown_timeout=_SHUTDOWN_S)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port, backlog=_BACKLOG).start()
        except OSError as error:
            raise UserError(f"expected a free port, found {host}:{port} taken or refused: {error.strerror}") from error
        address = runner.addresses[0]
        print(f"listening on http://{address[0]}:{address[1]}", flush=True)
        await stop.wait()
    finally:
        await runner.cleanup()


def end_with(owner: int) -> None:
    """End this process when the process ``owner`` has ended, however it ended: by SIGTERM, then at once."""
    try:
        handle = os.pidfd_open(owner)
    except ProcessLookupError:
        os._exit(1)

    def watch() -> None:
        select.select([handle], [], [])  # readable once it has ended
        os.kill(os.getpid(), signal.SIGTERM)
        select.select([], [], [], _GRACE_S)
        os._exit(1)

    threading.Thread(target=watch, name="owner", daemon=True).start()
