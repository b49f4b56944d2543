"""Buckets for engines on other hosts: the trainer listens at the address it was given, the engines fetch over TCP.

For machines without NCCL between them. A bucket is asked for by a key of 128 random bits that only the engines learn,
from the trainer's own calls; whoever asks for another gets nothing. What is sent is not encrypted.
"""

from __future__ import annotations

import secrets
import socket
import socketserver
import threading
from collections.abc import Iterator, Sequence

import numpy as np

from trace_megatron.errors import UserError
from trace_megatron.weight_sync.shared_memory import Bucket, Entry, Part, read_parts

SCHEME = "tcp://"
_KEY_BYTES = 16
_TIMEOUT_S = 60.0
"""Of a connection on which nothing moves."""


class BucketServer:
    """Listens at ``address``, on a port of the system's choice, until it is closed."""

    def __init__(self, address: str):
        self._offered: dict[str, Bucket] = {}
        offered = self._offered

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                self.request.settimeout(_TIMEOUT_S)
                bucket = offered.get(_receive(self.request, bytearray(2 * _KEY_BYTES)).decode("ascii", "replace"))
                if bucket is not None:
                    bucket.send(self.request)

        try:
            self._server = _Server((address, 0), Handler)
        except OSError as error:
            raise UserError(f"expected an address of this host at sync.address, found '{address}': {error}") from error
        self._thread = threading.Thread(target=self._server.serve_forever, name="weight-buckets", daemon=True)
        self._thread.start()

    def offer(self, bucket: Bucket) -> str:
        """The path by which an engine gets it."""
        self.withdraw(bucket)
        key = secrets.token_hex(_KEY_BYTES)
        self._offered[key] = bucket
        host, port = self._server.server_address[:2]
        return f"{SCHEME}{host}:{port}/{key}"

    def withdraw(self, bucket: Bucket) -> None:
        """Offer it no longer."""
        for key in [key for key, offered in self._offered.items() if offered is bucket]:
            del self._offered[key]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def check_address(address: str) -> None:
    """Raises UserError where this host has no such address."""
    BucketServer(address).close()


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """An engine that hung up says so itself."""


def fetch(path: str, entries: Sequence[Entry]) -> Iterator[Part]:
    """The tensors of the bucket at ``path``, as views of memory of their own. Raises ValueError."""
    address, _, key = path.removeprefix(SCHEME).rpartition("/")
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=_TIMEOUT_S) as connection:
            connection.sendall(key.encode())
            length = int.from_bytes(_receive(connection, bytearray(8)), "little")
            array = np.empty(length, dtype=np.uint8)
            _receive(connection, array)
    except OSError as error:
        raise ValueError(f"the trainer's weights cannot be fetched from {address}: {error}") from error
    return read_parts(array, entries)


def _receive(connection: socket.socket, buffer: bytearray | np.ndarray) -> bytearray | np.ndarray:
    """Fill ``buffer``; raises OSError where the stream ends before."""
    rest = memoryview(buffer)
    while rest:
        count = connection.recv_into(rest)
        if not count:
            raise OSError(f"the stream ended {len(rest)} bytes early")
        rest = rest[count:]
    return buffer
