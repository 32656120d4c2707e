"""OpenAPI documents of the gateway and the registry, from the models that they parse and answer with.

python -m docs.site.openapi [--check]

Each route has a row here; `tests/repo/test_site.py` compares the rows with the routes of the applications.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from docs.site.assemble import ROOT
from headrace import __version__
from headrace_gateway.requests.feedback_request import FeedbackRequest, TrinityCommit, TrinityFeedback
from headrace_schemas import Trajectory
from headrace_schemas.http import catalog, registry_api

FOLDER = ROOT / "docs" / "reference"


@dataclass(frozen=True)
class Operation:
    """One method of one route with the models of its body and its answer, and the status of a success.

    A text in place of a model is the name of the schema in another vendor's API.
    """

    summary: str
    body: type[BaseModel] | str | None = None
    answer: type[BaseModel] | str | None = None
    status: int = 200
    parameters: tuple[str, ...] = ()

    @property
    def models(self) -> list[type[BaseModel]]:
        return [model for model in (self.body, self.answer) if isinstance(model, type)]


Operations = Mapping[tuple[str, str], Operation]
_COMMON: Operations = {
    ("GET", "/health"): Operation("Report whether the service is ready, with the failed checks. 503 if it is not."),
    ("GET", "/metrics"): Operation("Return the metrics in the format of Prometheus."),
}
_CHAT = Operation(
    "Answer a conversation, streamed or not.", "OpenAI CreateChatCompletionRequest", "OpenAI ChatCompletion"
)
_MESSAGES = Operation("Answer a conversation, streamed or not.", "Anthropic MessageCreateParams", "Anthropic Message")
_RESPONSES = Operation("Answer an input, streamed or not.", "OpenAI ResponseCreateParams", "OpenAI Response")
_CONVERSATION = "/v1/conversations/{conversation_id}"
_ITEMS = f"{_CONVERSATION}/items"
_EVENT_IDS = "event_ids of the published events; for feedback also teaches and reason"
GATEWAY: Operations = {
    **_COMMON,
    ("GET", "/"): Operation("Answer clients that look whether the server is there."),
    ("POST", "/v1/chat/completions"): _CHAT,
    ("POST", "/chat"): _CHAT,
    ("POST", "/v1/completions"): Operation(
        "Continue a text or token ids.", "OpenAI CompletionCreateParams", "OpenAI Completion"
    ),
    ("POST", "/v1/messages"): _MESSAGES,
    ("POST", "/v1/messages/count_tokens"): Operation(
        "Count the tokens of a prompt.", "Anthropic MessageCountTokensParams", "Anthropic MessageTokensCount"
    ),
    ("POST", "/v1/responses"): _RESPONSES,
    ("POST", "/v1/responses/input_tokens"): Operation(
        "Count the tokens of an input.", "OpenAI InputTokenCountParams", "OpenAI InputTokenCount"
    ),
    ("GET", "/v1/responses/{response_id}"): Operation("Return a stored response.", answer="OpenAI Response"),
    ("DELETE", "/v1/responses/{response_id}"): Operation("Delete a stored response.", answer="OpenAI ResponseDeleted"),
    ("POST", "/v1/conversations"): Operation(
        "Create a conversation.", "OpenAI ConversationCreateParams", "OpenAI Conversation"
    ),
    ("GET", _CONVERSATION): Operation("Return a conversation without its items.", answer="OpenAI Conversation"),
    ("POST", _CONVERSATION): Operation(
        "Replace the metadata of a conversation.", "OpenAI ConversationUpdateParams", "OpenAI Conversation"
    ),
    ("DELETE", _CONVERSATION): Operation(
        "Delete a conversation. Its responses stay.", answer="OpenAI ConversationDeletedResource"
    ),
    ("GET", _ITEMS): Operation(
        "List items of a conversation.", answer="OpenAI ConversationItemList", parameters=("order", "limit", "after")
    ),
    ("POST", _ITEMS): Operation(
        "Add items to a conversation.", "OpenAI ItemCreateParams", "OpenAI ConversationItemList"
    ),
    ("GET", _ITEMS + "/{item_id}"): Operation("Return an item of a conversation.", answer="OpenAI ConversationItem"),
    ("DELETE", _ITEMS + "/{item_id}"): Operation("Remove an item from a conversation.", answer="OpenAI Conversation"),
    ("GET", "/v1/models"): Operation("List the models, in the form of the caller's API.", answer="OpenAI or Anthropic"),
    ("GET", "/v1/models/{model}"): Operation("Return one model, by any of its names.", answer="OpenAI or Anthropic"),
    ("POST", "/v1/feedback"): Operation(
        "Send feedback about responses, a session or a task.", FeedbackRequest, _EVENT_IDS, 202
    ),
    ("POST", "/v1/sessions/{session_id}/end"): Operation("End a session.", None, _EVENT_IDS, 202),
    ("POST", "/v1/trajectories"): Operation(
        "Publish a trajectory of another runtime; the gateway sets tenant, key and time.", Trajectory, _EVENT_IDS, 202
    ),
    ("POST", "/feedback"): Operation("Send feedback as clients of Trinity-RFT do.", TrinityFeedback, "status"),
    ("POST", "/commit"): Operation("End all runs, or those that began before a time.", TrinityCommit, "status"),
}
_STATE = registry_api.ModelState


def _change(summary: str, body: type[BaseModel], status: int = 200) -> Operation:
    return Operation(summary, body, _STATE, status)


REGISTRY: Operations = {
    **_COMMON,
    ("GET", "/v1/models"): Operation("List the models.", answer=registry_api.ModelList),
    ("GET", "/v1/models/{name}"): Operation("Return the state of a model.", answer=_STATE),
    ("GET", "/v1/models/{name}/versions"): Operation(
        "List the newest versions of a model.", answer=registry_api.VersionList, parameters=("limit",)
    ),
    ("POST", "/v1/models/{name}/promote"): _change(
        "Make a version the next candidate, or with force the champion.", registry_api.AuditedPromoteRequest, 202
    ),
    ("POST", "/v1/models/{name}/rollback"): _change("Return to the previous champion.", registry_api.RollbackRequest),
    ("POST", "/v1/models/{name}/withdraw"): _change(
        "Withdraw a version with its descendants.", registry_api.WithdrawRequest
    ),
    ("POST", "/v1/models/{name}/pin"): _change("Keep one version as champion.", registry_api.PinRequest),
    ("POST", "/v1/models/{name}/unpin"): _change("End the pin.", registry_api.HoldRequest),
    ("POST", "/v1/models/{name}/pause"): _change("Hold back new versions.", registry_api.HoldRequest),
    ("POST", "/v1/models/{name}/resume"): _change("End the pause.", registry_api.HoldRequest),
    ("POST", "/v1/models/{name}/stop"): _change("Pause and hold every rollout.", registry_api.HoldRequest),
    ("POST", "/v1/models/{name}/register"): _change("Register a version.", catalog.RegisterRequest, 201),
    ("POST", "/v1/models/{name}/serve"): _change("Serve a registered version.", catalog.ServeRequest),
    ("POST", "/v1/models/{name}/unserve"): _change("Stop to serve a registered version.", catalog.ServeRequest),
    ("POST", "/v1/models/{name}/aliases"): _change("Move aliases by compare-and-swap.", catalog.AliasesRequest),
    ("POST", "/v1/models/{name}/retire"): _change("Retire a version for good.", catalog.RetireRequest),
    ("POST", "/v1/models/{name}/tags"): _change("Set and remove tags of a version.", catalog.TagsRequest),
    ("POST", "/v1/models/{name}/notes"): _change("Add a note to a version.", catalog.NoteRequest),
    ("GET", "/v1/models/{name}/notes"): Operation(
        "List the notes of a version.", answer=catalog.NoteList, parameters=("version",)
    ),
    ("GET", "/v1/versions/{version}"): Operation("Return a version of any model.", answer=registry_api.VersionList),
    ("POST", "/v1/garbage"): Operation(
        "Collect files of retired versions.", catalog.GarbageRequest, catalog.GarbageReport
    ),
    ("GET", "/v1/audit"): Operation(
        "List changes with requester, time and reason.",
        answer=catalog.AuditList,
        parameters=("model", "before", "limit"),
    ),
    ("GET", "/v1/rollouts"): Operation(
        "List the newest rollouts.", answer=registry_api.RolloutList, parameters=("model", "limit")
    ),
    ("GET", "/v1/rollouts/{rollout}"): Operation("Return a rollout with its chart.", answer=registry_api.RolloutState),
    ("POST", "/v1/models/{name}/rollouts"): _change("Begin a rollout.", registry_api.RolloutRequest, 202),
    **{
        ("POST", f"/v1/rollouts/{{rollout}}/{change}"): Operation(
            f"{summary} a rollout.", registry_api.RolloutChange, registry_api.RolloutState
        )
        for change, summary in (("stop", "Hold"), ("promote", "Promote the candidate of"), ("rollback", "Roll back"))
    },
}


def document(title: str, operations: Operations) -> dict[str, Any]:
    """Return an OpenAPI 3.1 document."""
    models = sorted({model for each in operations.values() for model in each.models}, key=lambda model: model.__name__)
    references, definitions = models_json_schema(
        [(model, "validation") for model in models], ref_template="#/components/schemas/{model}"
    )
    paths: dict[str, dict[str, Any]] = {}
    for (method, path), operation in operations.items():
        paths.setdefault(path, {})[method.lower()] = _operation(method, path, operation, references)
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": __version__, "description": "Generated from the models; do not edit."},
        "paths": paths,
        "components": {
            "schemas": definitions.get("$defs", {}),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _operation(method: str, path: str, operation: Operation, references: Mapping[Any, Any]) -> dict[str, Any]:
    parameters = [{"name": name, "in": "path", "required": True} for name in re.findall(r"\{(\w+)\}", path)]
    parameters += [{"name": name, "in": "query", "required": False} for name in operation.parameters]

    def content(value: type[BaseModel] | str) -> dict[str, Any]:
        schema = {"type": "object", "description": value} if isinstance(value, str) else references[value, "validation"]
        return {"application/json": {"schema": schema}}

    answer = {"content": content(operation.answer)} if operation.answer else {}
    return {
        "operationId": "-".join([method.lower(), *re.findall(r"\w+", path)]),
        "summary": operation.summary,
        **({"parameters": [{**each, "schema": {"type": "string"}} for each in parameters]} if parameters else {}),
        **({"requestBody": {"required": True, "content": content(operation.body)}} if operation.body else {}),
        "responses": {
            str(operation.status): {"description": "Success.", **answer},
            "default": {"description": "An error, with its message, the parameter at fault and a code."},
        },
    }


def documents() -> dict[str, str]:
    """Return the text of each document by the name of its file in `docs/reference`."""
    contents = {
        "gateway.openapi.json": document("Headrace gateway", GATEWAY),
        "registry.openapi.json": document("Headrace registry", REGISTRY),
    }
    return {name: json.dumps(content, indent=1, ensure_ascii=False) + "\n" for name, content in contents.items()}


def main() -> None:
    """Write the documents, or with `--check` compare them with the files."""
    for name, text in documents().items():
        if "--check" not in sys.argv:
            (FOLDER / name).write_text(text, encoding="utf-8")
        elif (FOLDER / name).read_text(encoding="utf-8") != text:
            sys.exit(f"docs/reference/{name} differs from the models; run `make schemas`")


if __name__ == "__main__":
    main()
