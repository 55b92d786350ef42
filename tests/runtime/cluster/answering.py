"""Servers that answer, to be taken for a Ray cluster or not."""

from __future__ import annotations

import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager

GRPC = bytes((0, 0, 6, 4, 0, 0, 0, 0, 0)) + bytes((0, 3, 0, 0, 0, 100))
"""What a gRPC server sends first: HTTP/2 settings, here how many calls it takes at once."""


@contextmanager
def answering(words: bytes, host: str = "127.0.0.1") -> Iterator[str]:
    """A server that says so much to whoever connects."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.sendall(words)
            self.request.recv(1000)

    class Server(socketserver.ThreadingTCPServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

    with Server((host, 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"{f'[{host}]' if ':' in host else host}:{server.server_address[1]}"
        server.shutdown()
