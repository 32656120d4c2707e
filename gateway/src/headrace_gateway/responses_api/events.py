"""A response as a stream of events, whose last one holds the whole response.

One item is open at a time: `added`, its deltas, `done`. A whole answer is written by the same code, from one chunk.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pydantic_core import to_json

from headrace_gateway import sse
from headrace_gateway.engine_wire import EngineChoice, EngineMessage, EngineToolCall, EngineUsage, TokenLogprob
from headrace_gateway.refusals import ApiError
from headrace_gateway.responses_api import output
from headrace_gateway.responses_api.output import Json, ResponseFrame


@dataclass(slots=True)
class _Open:
    """The item that is being written."""

    kind: str
    item_id: str
    place: int
    text: str = ""
    call: EngineToolCall = field(default_factory=EngineToolCall)
    call_index: int | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)

    def item(self, status: str, *, begun: bool = True, shows_logprobs: bool = False) -> Json:
        text = self.text if begun else None
        match self.kind:
            case "msg":
                return output.message(self.item_id, text, status, self.logprobs if shows_logprobs and begun else None)
            case "rs":
                return output.reasoning(self.item_id, text, status)
            case "fc":
                return output.function_call(self.item_id, self.call, self.text, status)
        raise AssertionError(self.kind)

    def part(self) -> Json:
        return output.text_part(self.text) if self.kind == "msg" else output.reasoning_part(self.text)


_PREFIXES = {"msg": "response.output_text", "rs": "response.reasoning_text", "fc": "response.function_call_arguments"}


class ResponseWriter:
    """Deltas of one answer in, events out."""

    def __init__(self, frame: ResponseFrame, *, shows_logprobs: bool) -> None:
        self._frame = frame
        self._shows_logprobs = shows_logprobs
        self._number = 0
        self._begun = False
        self._open: _Open | None = None
        self._done: list[Json] = []
        self._version = ""
        self._finish: str | None = None
        self._usage: EngineUsage | None = None
        self._unsaid: list[TokenLogprob] = []
        """Of tokens that have made no text yet."""

    def add(
        self, version: str, choices: list[EngineChoice], usage: EngineUsage | None, *, streamed: bool
    ) -> list[Json]:
        """`streamed`: the choices have deltas, else messages."""
        self._version = self._version or version
        self._usage = usage or self._usage
        found: list[Json] = []
        for choice in choices:
            if not self._begun:
                self._begun = True
                opened = self._frame.response("in_progress", self._version, [], None, None)
                found += [{"type": "response.created", "response": opened}]
                found += [{"type": "response.in_progress", "response": opened}]
            found += self._said(choice.delta if streamed else choice.message, choice)
            self._finish = choice.finish_reason or self._finish
        return self._numbered(found)

    def end(self) -> list[Json]:
        """The last events; the response is the one of the very last."""
        found = [] if self._open or self._done else self._begin("msg")
        status = output.status_of(self._finish)
        found += self._close(status)
        whole = self._frame.response(status, self._version, self._done, self._usage, self._finish)
        return self._numbered([*found, {"type": f"response.{status}", "response": whole}])

    def _said(self, said: EngineMessage, choice: EngineChoice) -> list[Json]:
        found: list[Json] = []
        if self._shows_logprobs and choice.logprobs is not None:
            self._unsaid += choice.logprobs.content or ()
        if said.reasoning_content:
            found += self._continue("rs", said.reasoning_content)
        if said.content:
            found += self._continue("msg", said.content)
        for place, call in enumerate(said.tool_calls or ()):
            found += self._call(place if call.index is None else call.index, call)
        return found

    def _continue(self, kind: str, text: str) -> list[Json]:
        found = [] if self._open is not None and self._open.kind == kind else self._begin(kind)
        assert self._open is not None
        self._open.text += text
        delta = self._event("delta", delta=text, content_index=0)
        if kind == "msg":
            self._open.logprobs += self._unsaid
            delta["logprobs"] = self._unsaid
        self._unsaid = []
        return [*found, delta]

    def _call(self, index: int, call: EngineToolCall) -> list[Json]:
        found: list[Json] = []
        if self._open is None or self._open.kind != "fc" or self._open.call_index != index:
            found += self._begin("fc", call, index)
        assert self._open is not None
        if call.function.arguments:
            self._open.text += call.function.arguments
            found.append(self._event("delta", delta=call.function.arguments))
        return found

    def _begin(self, kind: str, call: EngineToolCall | None = None, index: int | None = None) -> list[Json]:
        found = self._close("completed")
        place = len(self._done)
        self._open = _Open(kind, self._frame.item_id(kind, place), place, call_index=index)
        self._open.call = call or EngineToolCall()
        added = self._open.item("in_progress", begun=False)
        found.append({"type": "response.output_item.added", "output_index": place, "item": added})
        if kind != "fc":
            found.append(self._part("added"))
        return found

    def _close(self, status: str) -> list[Json]:
        one = self._open
        if one is None:
            return []
        if one.kind == "fc":
            found = [self._event("done", arguments=one.text, name=one.call.function.name)]
        else:
            done = self._event("done", text=one.text, content_index=0)
            if one.kind == "msg":
                done["logprobs"] = one.logprobs
            found = [done, self._part("done")]
        item = one.item(status, shows_logprobs=self._shows_logprobs)
        self._open = None
        self._done.append(item)
        return [*found, {"type": "response.output_item.done", "output_index": one.place, "item": item}]

    def _event(self, what: str, **more: object) -> Json:
        assert self._open is not None
        about = {"item_id": self._open.item_id, "output_index": self._open.place}
        return {"type": f"{_PREFIXES[self._open.kind]}.{what}", **about, **more}

    def _part(self, what: str) -> Json:
        assert self._open is not None
        about = {"item_id": self._open.item_id, "output_index": self._open.place, "content_index": 0}
        return {"type": f"response.content_part.{what}", **about, "part": self._open.part()}

    def error(self, error: ApiError) -> list[Json]:
        return self._numbered([{"type": "error", "code": error.code, "message": str(error), "param": error.param}])

    def _numbered(self, events: list[Json]) -> list[Json]:
        for event in events:
            event["sequence_number"] = self._number
            self._number += 1
        return events


def encoded(events: list[Json]) -> bytes:
    return b"".join(sse.encode(to_json(event), event["type"]) for event in events)
