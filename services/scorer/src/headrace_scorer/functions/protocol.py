"""The messages between the scorer and a process of reward functions: four bytes of length, then JSON, over pipes."""

from __future__ import annotations

import struct
from typing import BinaryIO, Literal

from pydantic import BaseModel, JsonValue

from headrace_scorer.functions.loading import RewardFunction

LENGTH = struct.Struct(">I")


class LoadRequest(BaseModel):
    """First message to the process: the functions to load. `sources` has the text of files that were loaded before."""

    specs: tuple[str, ...]
    sources: dict[str, str] = {}
    memory_mb: int | None = None


class LoadResponse(BaseModel):
    """Answer to a `LoadRequest`. If `error` is set, no function is loaded and the process ends."""

    functions: tuple[RewardFunction, ...] = ()
    sources: dict[str, str] = {}
    uncovered: tuple[str, ...] = ()
    """Files of the user that the modules read and no digest covers."""
    error: str | None = None


class CallRequest(BaseModel):
    """Request to call one function. The next message is the trajectory as JSON."""

    kind: Literal["call"] = "call"
    function: str
    feedback: tuple[str, ...] = ()
    """Feedback events as JSON."""
    context: dict[str, JsonValue] = {}


def send(stream: BinaryIO, message: bytes) -> None:
    """Write one message with its length."""
    stream.write(LENGTH.pack(len(message)) + message)
    stream.flush()


def receive(stream: BinaryIO) -> bytes:
    """Read the next message. Raises `EOFError` when the other side has closed the pipe."""
    return _read_exactly(stream, LENGTH.unpack(_read_exactly(stream, LENGTH.size))[0])


def _read_exactly(stream: BinaryIO, size: int) -> bytes:
    data = stream.read(size)
    if len(data) < size:
        raise EOFError("the other side has closed the pipe")
    return data
