"""Catalog of the models, their names and the version that each name refers to, from the topic `routing`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace

from headrace_gateway.access.refusals import ApiError
from headrace_gateway.requests.chat_call import CHAMPION, Target
from headrace_gateway.requests.identity import CallIdentity
from headrace_schemas import Routing, UnitAssignment
from headrace_schemas.rules.assignment import assign_unit
from headrace_schemas.values.text import closest, printable

ANY_NAME = "*"
"""Alias in the settings that matches all unknown names."""
_MODEL_END = re.compile(r"[@:]")
_VERSION = re.compile(r".+@[0-9a-f]{16}")
REGISTERED = "registered"
"""`Turn.untrained` of a version that was registered and not trained by Headrace."""


def _anything(_model: str) -> bool:
    return True


class ModelCatalog:
    """Latest routing of each model.

    Args:
        aliases: For each name that clients use, the name of a model here. The name `*` matches all unknown names.
        loaded: Function that returns whether all existing rows of the topic have been read.
        changed: Function that is called after each update.
        any_name: Whether, while there is a single model, unknown names refer to it.
    """

    def __init__(
        self,
        aliases: Mapping[str, str],
        loaded: Callable[[], bool],
        changed: Callable[[], None],
        *,
        any_name: bool = False,
    ) -> None:
        self._aliases = aliases
        self._any_name = any_name
        self._loaded = loaded
        self._changed = changed
        self._rows: dict[str, Routing] = {}

    def update(self, key: str, routing: Routing | None) -> None:
        """Apply a row of the topic, unless it is older than the present routing of the model. None removes the
        model."""
        if routing is None:
            self._rows.pop(key, None)
        elif key not in self._rows or routing.revision >= self._rows[key].revision:
            self._rows[key] = routing
        self._changed()

    @property
    def has_default_model(self) -> bool:
        """Whether the settings name a model (alias `*`) to which all unknown names refer."""
        return ANY_NAME in self._aliases

    @property
    def is_ready(self) -> bool:
        """Whether the topic has been read and contains a model."""
        return self._loaded() and bool(self._rows)

    def resolve(self, requested: str, may_use: Callable[[str], bool] = _anything, *, by_agent: bool = False) -> Target:
        """Return the model and the alias or version that the `model` of a request refers to.

        Args:
            requested: The name in the request.
            may_use: Function that returns whether the caller may use a model.
            by_agent: Whether an agent may have sent the request, which may know its model by another name. Programs of
                Headrace know the names, and their mistakes must not reach another model.

        Raises:
            ApiError: 404, no routing names the model, alias or version, or the caller may not use it.
        """
        name = self._aliases.get(requested) or self._substitute(requested, by_agent=by_agent) or requested
        target = self._target(requested, name, may_use)
        return replace(target, is_substitute=name != requested and requested not in self._aliases)

    def routing_of(self, target: Target) -> Routing:
        """Return the routing of the model that `resolve` returned."""
        return self._rows[target.model]

    def _substitute(self, requested: str, *, by_agent: bool) -> str | None:
        """Return the name to use in place of an unknown name, or None.

        There is none for a misspelt alias or version of a known model, nor for a name in the form of a version.
        """
        if _MODEL_END.split(requested, maxsplit=1)[0] in self._rows or _VERSION.fullmatch(requested):
            return None
        if ANY_NAME in self._aliases:
            return self._aliases[ANY_NAME]
        is_allowed = self._any_name and by_agent and len(self._rows) == 1
        return next(iter(self._rows)) if is_allowed else None

    def _target(self, requested: str, name: str, may_use: Callable[[str], bool]) -> Target:
        model, _, digest = name.partition("@")
        if digest:
            if not may_use(model) or not self.is_usable(model, name):
                raise self._unknown(requested, may_use)
            return Target(model, version=name)
        model, _, alias = name.partition(":")
        routing = self._rows.get(model)
        if routing is None or (alias and alias not in _aliases(routing)) or not may_use(model):
            raise self._unknown(requested, may_use)
        return Target(model, alias or CHAMPION)

    def version_of(self, target: Target) -> str | None:
        """Return the version to which `target` refers now, or None before the model's first promotion."""
        if target.version is not None:
            return target.version
        routing = self._rows.get(target.model)
        return _aliases(routing).get(target.alias) if routing else None

    def untrained(self, model: str, version: str) -> str | None:
        """Return the reason why turns answered by `version` are never trained (an operator registered it), or None."""
        routing = self._rows.get(model)
        return REGISTERED if routing is not None and version in routing.untrained else None

    def draw(self, model: str, identity: CallIdentity) -> tuple[str | None, UnitAssignment | None]:
        """Return the version and the rollout assignment for a session that begins now.

        Without a rollout that splits traffic, this is the champion and None.
        """
        routing = self._rows.get(model)
        if routing is None or routing.champion is None:
            return None, None
        split = routing.split
        if split is None or identity.purpose != "train":
            return routing.champion, None
        by_user = identity.user_key if split.unit == "user" else None
        return assign_unit(split, routing.champion, by_user or identity.session_key)

    def is_under_way(self, model: str, assignment: UnitAssignment | None) -> bool:
        """Return whether a rollout that assigned a version to the session is still in progress."""
        routing = self._rows.get(model)
        arms = routing.split.arms if routing and routing.split else ()
        return assignment is not None and any(arm.rollout_id in assignment.rollouts for arm in arms)

    def is_usable(self, model: str, version: str) -> bool:
        """Return whether the routing of `model` serves `version` and has not withdrawn it."""
        routing = self._rows.get(model)
        return routing is not None and version in _versions(routing) and version not in routing.withdrawn

    def names(self, may_use: Callable[[str], bool] = _anything) -> list[tuple[str, Routing]]:
        """Return all names that the caller may send as `model`, each with the routing of its model."""
        listed = []
        for model in sorted(filter(may_use, self._rows)):
            routing = self._rows[model]
            usable = [version for version in _versions(routing) if version not in routing.withdrawn]
            listed += [(name, routing) for name in (model, *(f"{model}:{a}" for a in _aliases(routing)), *usable)]
        routings = dict(listed)
        aliases = [(foreign, model_name) for foreign, model_name in self._aliases.items() if foreign != ANY_NAME]
        return listed + [(foreign, routings[model_name]) for foreign, model_name in aliases if model_name in routings]

    def _unknown(self, requested: str, may_use: Callable[[str], bool]) -> ApiError:
        similar = closest(requested, (name for name, _ in self.names(may_use)))
        hint = f"did you mean {similar!r}?" if similar else "GET /v1/models lists what is served"
        message = f"the model '{printable(requested)}' does not exist here; {hint}"
        return ApiError(404, "model_not_found", message, "model")


def _aliases(routing: Routing) -> dict[str, str]:
    """Return the version of each alias. Roles such as `champion` have precedence over names that an operator set."""
    return routing.names | {str(role): version for role, version in routing.aliases.items()}


def _versions(routing: Routing) -> dict[str, None]:
    """Return the served versions without duplicates, those with an alias first."""
    return dict.fromkeys([*routing.aliases.values(), *(served.version for served in routing.serve)])
