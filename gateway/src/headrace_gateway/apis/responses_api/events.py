"""A response as a stream of events; the last event holds the whole response.

One item is open at a time: `added`, its deltas, `done`. A whole answer is written by the same code, from one chunk.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace_gateway.access.refusals import ApiError
from headrace_gateway.apis.responses_api import output
from headrace_gateway.apis.responses_api.output import Json, ResponseFrame
from headrace_gateway.apis.responses_api.tools import CustomTool, OfferedTool
from headrace_gateway.requests.engine_wire import EngineChoice, EngineMessage, EngineToolCall, EngineUsage, TokenLogprob

_PREFIXES = {
    "msg": "response.output_text",
    "rs": "response.reasoning_text",
    "fc": "response.function_call_arguments",
    "ctc": "response.custom_tool_call_input",
}
"""The events of each kind of item. The kinds are the prefixes of item ids."""
_CALLS = ("fc", "ctc")


@dataclass(slots=True)
class _OpenItem:
    """The item that is being written."""

    kind: str
    item_id: str
    position: int
    encrypts: bool
    pieces: list[str] = field(default_factory=list)
    """The text, the reasoning, or the arguments of a call, as they came."""
    call: EngineToolCall = field(default_factory=EngineToolCall)
    call_index: int | None = None
    tool: OfferedTool | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def item(self, status: str, *, begun: bool = True, shows_logprobs: bool = False) -> Json:
        """Return the item with everything that it holds so far."""
        text = self.text if begun else None
        match self.kind:
            case "msg":
                return output.message(self.item_id, text, status, self.logprobs if shows_logprobs and begun else None)
            case "rs":
                return output.reasoning(self.item_id, text, status, encrypts=self.encrypts)
            case "ctc":
                assert self.tool is not None
                return output.custom_tool_call(self.item_id, self.call.id, self.tool, self.text, status)
        name = self.call.function.name
        return output.function_call(self.item_id, self.call.id, name, self.tool, self.text, status)

    def part(self) -> Json:
        """Return the content part of a message or of reasoning."""
        return output.text_part(self.text) if self.kind == "msg" else output.reasoning_part(self.text)


class ResponseWriter:
    """Turns the deltas of one answer into events."""

    def __init__(self, frame: ResponseFrame, *, shows_logprobs: bool) -> None:
        self._frame = frame
        self._shows_logprobs = shows_logprobs
        self._number = 0
        self._begun = False
        self._open: _OpenItem | None = None
        self._items: list[Json] = []
        self._version = ""
        self._finish: str | None = None
        self._usage: EngineUsage | None = None
        self._pending_logprobs: list[TokenLogprob] = []
        """Logprobs of tokens that have made no text yet."""

    def add(
        self, version: str, choices: list[EngineChoice], usage: EngineUsage | None, *, streamed: bool
    ) -> list[Json]:
        """Return the events of a chunk. `streamed`: the choices have deltas, else messages."""
        self._version = self._version or version
        self._usage = usage or self._usage
        events: list[Json] = []
        for choice in choices:
            if not self._begun:
                self._begun = True
                opened = self._frame.response("in_progress", self._version, [], None, None)
                events += [{"type": "response.created", "response": opened}]
                events += [{"type": "response.in_progress", "response": opened}]
            events += self._added(choice.delta if streamed else choice.message, choice)
            self._finish = choice.finish_reason or self._finish
        return self._numbered(events)

    def end(self) -> list[Json]:
        """Return the last events; the very last one holds the response."""
        events = [] if self._open or self._items else self._begin("msg")
        status = output.status_of(self._finish)
        events += self._close(status)
        response = self._frame.response(status, self._version, self._items, self._usage, self._finish)
        return self._numbered([*events, {"type": f"response.{status}", "response": response}])

    def error(self, error: ApiError) -> list[Json]:
        """Return the event of a stream that breaks."""
        return self._numbered([{"type": "error", "code": error.code, "message": str(error), "param": error.param}])

    def _added(self, added: EngineMessage, choice: EngineChoice) -> list[Json]:
        events: list[Json] = []
        if self._shows_logprobs and choice.logprobs is not None:
            self._pending_logprobs += choice.logprobs.content or ()
        if added.reasoning_content:
            events += self._add_text("rs", added.reasoning_content)
        if added.content:
            events += self._add_text("msg", added.content)
        for index, call in added.indexed_calls:
            events += self._add_call(index, call)
        return events

    def _add_text(self, kind: str, text: str) -> list[Json]:
        events = [] if self._open is not None and self._open.kind == kind else self._begin(kind)
        assert self._open is not None
        self._open.pieces.append(text)
        delta = self._event("delta", delta=text, content_index=0)
        if kind == "msg":
            self._open.logprobs += self._pending_logprobs
            delta["logprobs"] = self._pending_logprobs
        self._pending_logprobs = []
        return [*events, delta]

    def _add_call(self, index: int, call: EngineToolCall) -> list[Json]:
        """Add to a call. The text of a custom tool is sent when its arguments are complete."""
        events: list[Json] = []
        if self._open is None or self._open.kind not in _CALLS or self._open.call_index != index:
            tool = self._frame.tool(call.function.name)
            is_custom = tool is not None and isinstance(tool.tool, CustomTool)
            events += self._begin("ctc" if is_custom else "fc", call, index, tool)
        assert self._open is not None
        if call.function.arguments:
            self._open.pieces.append(call.function.arguments)
            if self._open.kind == "fc":
                events.append(self._event("delta", delta=call.function.arguments))
        return events

    def _begin(
        self,
        kind: str,
        call: EngineToolCall | None = None,
        index: int | None = None,
        tool: OfferedTool | None = None,
    ) -> list[Json]:
        events = self._close("completed")
        position = len(self._items)
        encrypts = self._frame.encrypts_reasoning
        self._open = _OpenItem(kind, self._frame.item_id(kind, position), position, encrypts, call_index=index)
        self._open.call, self._open.tool = call or EngineToolCall(), tool
        added = self._open.item("in_progress", begun=False)
        events.append({"type": "response.output_item.added", "output_index": position, "item": added})
        if kind not in _CALLS:
            events.append(self._part("added"))
        return events

    def _close(self, status: str) -> list[Json]:
        open_item = self._open
        if open_item is None:
            return []
        item = open_item.item(status, shows_logprobs=self._shows_logprobs)
        if open_item.kind == "fc":
            events = [self._event("done", arguments=item["arguments"], name=item["name"])]
        elif open_item.kind == "ctc":
            events = [self._event("delta", delta=item["input"]), self._event("done", input=item["input"])]
        else:
            event = self._event("done", text=open_item.text, content_index=0)
            if open_item.kind == "msg":
                event["logprobs"] = open_item.logprobs
            events = [event, self._part("done")]
        self._open = None
        self._items.append(item)
        return [*events, {"type": "response.output_item.done", "output_index": open_item.position, "item": item}]

    def _event(self, event: str, /, **fields: object) -> Json:
        assert self._open is not None
        location = {"item_id": self._open.item_id, "output_index": self._open.position}
        return {"type": f"{_PREFIXES[self._open.kind]}.{event}", **location, **fields}

    def _part(self, name: str) -> Json:
        assert self._open is not None
        location = {"item_id": self._open.item_id, "output_index": self._open.position, "content_index": 0}
        return {"type": f"response.content_part.{name}", **location, "part": self._open.part()}

    def _numbered(self, events: list[Json]) -> list[Json]:
        for event in events:
            event["sequence_number"] = self._number
            self._number += 1
        return events
