"""uvicorn's HTTP/1.1 protocol with timeouts in both directions and without ambiguous requests.

Requests of ambiguous length are refused, because they allow request smuggling (RFC 9112, section 6.1). The connections
of clients that send too slowly (slowloris), or that read their response too slowly, are closed. `connections` limits
the number of the other connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import http
import json
import socket
import struct
import termios
from typing import Any, Literal

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from headrace_runtime.http.connections import ConnectionLimits, is_authenticated

HEADER_TIMEOUT_S = 10.0
"""Seconds for the header of a request, from its first byte; for the first request from the beginning of the
connection."""
HEADER_BYTES_MAX = 16_384
"""Maximum size of a request's header. Clients with many cookies send up to 8 KiB."""
BODY_TIMEOUT_S = 30.0
"""Seconds for the body of a request to arrive. The largest body, 16 MiB, needs 4.5 Mbit/s."""
_SMALL_CHUNKS_MAX = 1024
_CHUNK_BYTES_MIN = 64
"""Minimum mean size of a body's chunks after the first 1,024 chunks. Each chunk takes 6 us of the event loop, whatever
its size, so a body in chunks of one byte would block all other requests."""
_GRACE_S = 1.0
"""Additional seconds for the body, so that an application with its own timeout responds first."""
_LINGER_S = 1.0
_READ_TIMEOUT_S = 120.0
"""Seconds within which a client must read at least one byte of a response that waits for it. Otherwise the stream would
wait forever and count as a call in progress."""
_RESPONSE_WAIT_S = 900.0
"""Seconds for which a response may wait for its client in total. The largest response, 64 MiB, needs 0.6 Mbit/s."""
_INTEGER = struct.Struct("i")
_Waiting = Literal["header", "body"]


class TimedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 protocol with timeouts, for uvicorn's option `http`."""

    def __init__(self, limits: ConnectionLimits, *positional: Any, **named: Any) -> None:
        super().__init__(*positional, **named)
        self._limits = limits
        self.conn = self._strict = _StrictConnection(HEADER_BYTES_MAX)
        self._is_unused = True
        """Whether no data was received yet."""
        self._is_refused = False
        """Whether the connection was refused and is about to be closed."""
        self._waiting: _Waiting | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None
        self._waited_s = self._paused_at_s = 0.0
        """Time for which the present response has waited for the client before, and the start of the present wait."""
        self._has_key = False
        """Whether a request of this connection had a valid key."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        connection: socket.socket = transport.get_extra_info("socket")
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            # asyncio sets this option only for sockets with an explicit protocol, which inherited ones lack
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        super().connection_made(transport)
        if self._limits.open(self):
            self._watch()
        else:
            self._refuse(503, "the service has as many connections as it accepts; try again later")

    def abort(self) -> None:
        """Close the connection at once. Bytes that wait for the client are discarded."""
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._stop_unread_timer()
        self._limits.close(self)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._paused_at_s = self.loop.time()
        self._limits.hold(self, self.transport.get_write_buffer_size())
        self._watch_reader(self._unread_bytes())

    def resume_writing(self) -> None:
        self._waited_s = 0.0 if self.cycle.response_complete else self._response_wait_s()
        self._stop_unread_timer()
        self._limits.release(self)
        super().resume_writing()
        self._note_progress()

    def data_received(self, data: bytes) -> None:
        self._is_unused = False
        if not self._is_refused:
            super().data_received(data)

    def handle_events(self) -> None:
        super().handle_events()
        self._watch()

    def on_response_complete(self) -> None:
        if not self.flow.write_paused:
            self._waited_s = 0.0
        super().on_response_complete()
        self._watch()

    def send_400_response(self, msg: str) -> None:
        """Respond to an invalid request with the matching status and reason, and close the connection."""
        status, reason = self._strict.refusal or (400, msg)
        self._refuse(status, reason)

    def _watch(self) -> None:
        if self._is_refused or self.transport.is_closing():
            return
        if self.conn.their_state is h11.SEND_BODY:
            self._wait_for("body")
        elif self.conn.their_state is h11.IDLE and (self._is_unused or self.conn.trailing_data[0]):
            self._wait_for("header")
        else:
            self._wait_for(None)
        self._note_progress()

    def _note_progress(self) -> None:
        """Report to the connection limits whether the connection is idle.

        It is in use while a response is being sent, and while a request is complete or has a valid key.
        """
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is not None and not self._has_key:
            self._has_key = is_authenticated(cycle.scope)
        is_in_progress = cycle is not None and not cycle.response_complete
        is_received = self._has_key or self.conn.their_state is not h11.SEND_BODY
        if self.flow.write_paused or (is_in_progress and is_received):
            self._limits.resume(self)
        else:
            self._limits.rest(self, has_key=self._has_key)

    def _wait_for(self, part: _Waiting | None) -> None:
        """Start the timeout for a part of the request, unless it is already running. With None stop the timeout."""
        if part == self._waiting:
            return
        self._waiting = part
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if part is not None:
            seconds = HEADER_TIMEOUT_S if part == "header" else BODY_TIMEOUT_S + _GRACE_S
            self._timer = self.loop.call_later(seconds, self._time_out, part)

    def _time_out(self, part: _Waiting) -> None:
        if self._is_unused:
            self.transport.close()
            return
        limit_s = HEADER_TIMEOUT_S if part == "header" else BODY_TIMEOUT_S
        self._refuse(408, f"the request's {part} took longer than {limit_s:g} s")

    def _watch_reader(self, unread_bytes: int) -> None:
        """Start the timeout after which the connection is closed if the client has read none of its `unread_bytes`."""
        self._stop_unread_timer()
        seconds = min(_READ_TIMEOUT_S, max(0.0, _RESPONSE_WAIT_S - self._response_wait_s()))
        self._unread_timer = self.loop.call_later(seconds, self._check_reader, unread_bytes)

    def _response_wait_s(self) -> float:
        return self._waited_s + self.loop.time() - self._paused_at_s

    def _check_reader(self, unread_bytes: int) -> None:
        unread_now = self._unread_bytes()
        if unread_now < unread_bytes and self._response_wait_s() < _RESPONSE_WAIT_S:
            self._watch_reader(unread_now)
        else:
            self.transport.abort()

    def _stop_unread_timer(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def _unread_bytes(self) -> int:
        """Return the number of bytes that the client has not received, including those in the operating system's send
        queue."""
        queue = bytearray(_INTEGER.size)
        with contextlib.suppress(OSError):
            fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, queue)
        return int(self.transport.get_write_buffer_size() + _INTEGER.unpack(queue)[0])

    def _refuse(self, status: int, reason: str) -> None:
        """Send an error response, unless a response has begun, and close the connection."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE) and not self.transport.is_closing():
            error = {"message": reason, "type": "invalid_request_error", "param": None, "code": "invalid_http"}
            body = json.dumps({"error": error}).encode()
            headers = [
                ("content-type", "application/json"),
                ("content-length", str(len(body))),
                ("connection", "close"),
            ]
            phrase = http.HTTPStatus(status).phrase.encode()
            events = (
                h11.Response(status_code=status, headers=headers, reason=phrase),
                h11.Data(data=body),
                h11.EndOfMessage(),
            )
            for event in events:
                if not (self._strict.head and isinstance(event, h11.Data)):
                    self.transport.write(self.conn.send(event) or b"")
            self._linger()
        else:
            self._wait_for(None)
            self.transport.close()
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True  # so that further output of the application is discarded
            cycle.message_event.set()

    def _linger(self) -> None:
        """Close the connection after `_LINGER_S` seconds. If it were closed at once, data that still arrives would make
        the system discard the response."""
        self._is_refused = True
        self._wait_for(None)
        self.transport.write_eof()
        self._timer = self.loop.call_later(_LINGER_S, self.transport.close)


class _StrictConnection(h11.Connection):
    """h11 connection that refuses requests of ambiguous length and too large headers, which h11 accepts."""

    def __init__(self, header_bytes_max: int) -> None:
        super().__init__(h11.SERVER, header_bytes_max)
        self._header_bytes_max = header_bytes_max
        self.refusal: tuple[int, str] | None = None
        """Status and reason of the last error."""
        self.head = False
        """Whether the request's method is HEAD, so that its response has no body."""
        self._chunks = self._chunk_bytes = 0
        """Number and bytes of the chunks of the present body."""

    def next_event(self) -> Any:
        """Return h11's next event after further checks.

        Raises:
            h11.RemoteProtocolError: the request is invalid, its length is ambiguous, or its header is too large.
        """
        try:
            event = super().next_event()
            if isinstance(event, h11.Request):
                self.head = event.method == b"HEAD"
                self._chunks = self._chunk_bytes = 0
                self._check(event)
            elif isinstance(event, h11.Data):
                self._check_chunks(event)
        except h11.RemoteProtocolError as error:
            status = error.error_status_hint
            too_large = f"the request's header is larger than {self._header_bytes_max} bytes"
            self.refusal = (status, too_large if status == 431 else f"not valid HTTP: {error}")
            raise
        return event

    def _check(self, request: h11.Request) -> None:
        names = [name for name, _ in request.headers]
        if b"transfer-encoding" in names:
            if b"content-length" in names:
                raise h11.RemoteProtocolError("the request has both Content-Length and Transfer-Encoding; send one")
            if request.http_version != b"1.1":
                raise h11.RemoteProtocolError("the request has Transfer-Encoding, which needs HTTP/1.1")
        size = len(request.target) + sum(len(name) + len(value) + 4 for name, value in request.headers)
        if size > self._header_bytes_max:  # h11 does not measure a header that arrives in one piece
            raise h11.RemoteProtocolError("too large", error_status_hint=431)

    def _check_chunks(self, data: h11.Data) -> None:
        self._chunks += data.chunk_start
        self._chunk_bytes += len(data.data)
        complete = self._chunks - 1  # the last one may have arrived in part
        if complete >= _SMALL_CHUNKS_MAX and self._chunk_bytes < _CHUNK_BYTES_MIN * complete:
            raise h11.RemoteProtocolError(f"a body in chunks of less than {_CHUNK_BYTES_MIN} bytes; send larger ones")
