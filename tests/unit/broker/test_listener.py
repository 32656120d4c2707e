"""The broker's own socket."""

from __future__ import annotations

import asyncio
import socket

from headrace_broker.server import listening_socket


async def test_small_answers_are_not_held_back() -> None:
    accepted: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def accept(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection: socket.socket = writer.get_extra_info("socket")
        accepted.set_result(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    listener = listening_socket("127.0.0.1", 0)
    server = await asyncio.start_server(accept, sock=listener)
    async with server:
        _, writer = await asyncio.open_connection(*listener.getsockname())
        assert await asyncio.wait_for(accepted, 20) == 1
        writer.close()
