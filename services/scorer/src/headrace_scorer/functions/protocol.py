"""The messages between the scorer and a process of reward functions: four bytes of length, then JSON, over pipes."""

from __future__ import annotations

import struct
from typing import BinaryIO, Literal

from pydantic import BaseModel, JsonValue

from headrace_scorer.functions.loading import RewardFunction

LENGTH = struct.Struct(">I")


class LoadRequest(BaseModel):
    """The first message: what to load. `sources` holds the text of files that were loaded before."""

    specs: tuple[str, ...]
    sources: dict[str, str] = {}
    memory_mb: int | None = None


class LoadResponse(BaseModel):
    """Its answer. `error` set: nothing is loaded and the process ends."""

    functions: tuple[RewardFunction, ...] = ()
    sources: dict[str, str] = {}
    uncovered: tuple[str, ...] = ()
    """Files of the user that the modules read and no digest covers."""
    error: str | None = None


class CallRequest(BaseModel):
    """Run one function. The trajectory is JSON in a message of its own behind this one."""

    kind: Literal["call"] = "call"
    function: str
    feedback: tuple[str, ...] = ()
    """Each as JSON."""
    context: dict[str, JsonValue] = {}


def send(stream: BinaryIO, message: bytes) -> None:
    stream.write(LENGTH.pack(len(message)) + message)
    stream.flush()


def receive(stream: BinaryIO) -> bytes:
    """The next message. Raises `EOFError` when the other side is gone."""
    return _exactly(stream, LENGTH.unpack(_exactly(stream, LENGTH.size))[0])


def _exactly(stream: BinaryIO, size: int) -> bytes:
    data = stream.read(size)
    if len(data) < size:
        raise EOFError("the other side of the pipe is gone")
    return data
