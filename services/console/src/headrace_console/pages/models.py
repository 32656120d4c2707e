"""Models, and one version with all decisions about it, its promotion and its withdrawal."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from headrace_console import learning
from headrace_console.pages.frame import Templates
from headrace_console.pages.page import NotFound, Page, read_reason
from headrace_console.sources.registry import VERSIONS_MAX, RegistryReader
from headrace_console.users import User
from headrace_runtime.http.web import parameters_of
from headrace_schemas.http.registry_api import AuditedPromoteRequest, VersionState, WithdrawRequest

_UNPROMOTABLE = ("promoted", "canary", "withdrawn")


class ModelPages:
    """Pages of models and versions. Changes go through the registry's REST interface and its audit log."""

    def __init__(self, templates: Templates, registry: RegistryReader) -> None:
        self._templates = templates
        self._registry = registry

    def pages(self) -> list[Page]:
        """Return the pages."""
        version = "/models/{model}/{digest}"
        return [
            Page("/models", self.models),
            Page("/models/{model}", self.model),
            Page(version, self.version),
            Page(f"{version}/promote", self.promote, role="operator", method="POST"),
            Page(f"{version}/withdraw", self.withdraw, role="operator", method="POST"),
        ]

    async def models(self, request: Request, user: User) -> Response:
        """List the models."""
        parameters_of(request)
        return self._templates.render(request, user, "models.html", models=await self._registry.models())

    async def model(self, request: Request, user: User) -> Response:
        """Show a model with its newest versions."""
        parameters_of(request)
        state = await self._registry.model(request.path_params["model"])
        versions = await self._registry.versions(state.id)
        return self._templates.render(
            request,
            user,
            "model.html",
            model=state,
            versions=versions,
            scores={score.version: score for score in learning.scored_versions(versions)},
            described=learning.describe_learning(state.id, state.champion, versions),
            versions_max=VERSIONS_MAX,
        )

    async def version(self, request: Request, user: User) -> Response:
        """Show a version and the numbers of each decision about it."""
        parameters_of(request)
        version = await find_version(self._registry, request)
        model = await self._registry.model(version.model)
        return self._templates.render(
            request,
            user,
            "version.html",
            version=version,
            model=model,
            sentence=describe_decision(version),
            can_promote=user.has_role("operator") and version.state not in _UNPROMOTABLE and not version.retired,
            can_withdraw=user.has_role("operator") and version.state != "withdrawn" and version.id != model.champion,
        )

    async def promote(self, request: Request, user: User) -> Response:
        """Make a version the next candidate. It still passes the gate."""
        version = await find_version(self._registry, request)
        body = AuditedPromoteRequest(version=version.id, reason=await read_reason(request))
        await self._registry.change(f"/v1/models/{version.model}/promote", body, user)
        return RedirectResponse(request.url.path.removesuffix("/promote"), 303)

    async def withdraw(self, request: Request, user: User) -> Response:
        """Withdraw a version, so that it never serves."""
        version = await find_version(self._registry, request)
        body = WithdrawRequest(version=version.id, reason=await read_reason(request))
        await self._registry.change(f"/v1/models/{version.model}/withdraw", body, user)
        return RedirectResponse(request.url.path.removesuffix("/withdraw"), 303)


async def find_version(registry: RegistryReader, request: Request) -> VersionState:
    """Return the version of the path, whose digest may be cut. Raises `NotFound` unless one version matches."""
    prefix = f"{request.path_params['model']}@{request.path_params['digest']}"
    versions = await registry.versions(request.path_params["model"])
    matches = [version for version in versions if version.id.startswith(prefix)]
    if len(matches) != 1:
        raise NotFound
    return matches[0]


def describe_decision(version: VersionState) -> str:
    """Return a sentence with the last decision about a version that changed its state."""
    words = {
        "promoted": "took over",
        "rejected": "was refused",
        "skipped": "was skipped",
        "rolled_back": "was taken back",
        "withdrawn": "was withdrawn",
    }
    decisions = [event for event in version.decisions if event.decision in words]
    if not decisions:
        return f"{version.id} is {version.state.replace('_', ' ')}; nothing was decided about it yet."
    event = decisions[-1]
    verb = words[event.decision]
    if event.rollout is not None and event.rollout.kind in ("begin", "advance", "hold"):
        verb = {"begin": "began a rollout", "advance": "got a larger share", "hold": "was held"}[event.rollout.kind]
    author = f" by {event.who}" if event.who else ""
    against = f", compared with {event.previous}" if event.previous else ""
    numbers = f" {numbers}" if (numbers := learning.describe_numbers(event)) else ""
    reason = f": {event.reason}" if event.reason else ""
    return f"{version.id} {verb}{author}{against}{numbers}{reason}"
