"""Requests and responses of the registry about fixed versions, aliases, tags, notes, garbage and the audit log.

Each change has a reason, `why`. The caller is identified by its key and by the header `WHO_HEADER`.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from headrace_schemas.values.base import AliasName, Model, ModelName, Remark, Text, Timestamp, Version
from headrace_schemas.values.blobs import BlobRef

WHO_HEADER = "x-headrace-who"
"""Header with a name that the caller chooses. The audit log records it in addition to the authenticated principal."""
NOTES_MAX = 200
"""Maximum number of notes of one version."""


class RegisterRequest(Model):
    """Request of `POST /v1/models/{name}/register`: a fixed version whose files are in the blob store.

    Registering an existing version changes nothing, except that a retired version becomes available again.
    """

    manifest: BlobRef
    label: AliasName | None = None
    """A permanent name of this version, such as `v1.0`. It never moves to another version."""
    serve: bool = False
    why: Remark = ""


class ServeRequest(Model):
    """Request of `POST /v1/models/{name}/serve` and `.../unserve`."""

    version: Version
    why: Remark = ""


class AliasMove(Model):
    """The new version of an alias and the version that the caller expects it to name now.

    `version` None removes the alias.
    """

    version: Version | None
    expected: Version | None


class AliasesRequest(Model):
    """Request of `POST /v1/models/{name}/aliases`. If one alias is not as expected, none is moved."""

    moves: dict[AliasName, AliasMove] = Field(min_length=1, max_length=64)
    why: Remark = ""


class RetireRequest(Model):
    """Request of `POST /v1/models/{name}/retire`."""

    version: Version
    why: Remark = ""


class TagsRequest(Model):
    """Request of `POST /v1/models/{name}/tags`."""

    version: Version
    add: tuple[AliasName, ...] = Field(default=(), max_length=64)
    remove: tuple[AliasName, ...] = Field(default=(), max_length=64)
    why: Remark = ""


class NoteRequest(Model):
    """Request body of `POST /v1/models/{name}/notes`, which attaches a text by an operator to a version."""

    version: Version
    text: Annotated[Remark, Field(min_length=1)]


class Note(Model):
    """An operator's note about a version."""

    text: str
    who: str
    at: Timestamp


class NoteList(Model):
    """Response of `GET /v1/models/{name}/notes?version=`: the oldest first."""

    object: Text = "list"
    data: tuple[Note, ...]


class AuditEntry(Model):
    """One change that a caller requested and the registry carried out."""

    number: Annotated[int, Field(ge=1)]
    at: Timestamp
    principal: Text
    """The authenticated principal: `internal` for `security.internal_key`, `open` if no key is set."""
    who: str
    """The name in `WHO_HEADER`; empty without the header."""
    action: Text
    model: ModelName
    version: Version | None = None
    why: str
    detail: str = ""


class AuditList(Model):
    """Response of `GET /v1/audit?model=&before=&limit=`: the newest first."""

    object: Text = "list"
    data: tuple[AuditEntry, ...]


class GarbageRequest(Model):
    """Request of `POST /v1/garbage`. By default it is a dry run, which only reports the files that would be removed."""

    dry_run: bool = True
    why: Remark = ""


class KeptVersion(Model):
    """A retired version whose files are still needed, and the versions and aliases that need them."""

    version: Version
    needed_by: tuple[str, ...]


class CollectedVersion(Model):
    """A retired version whose files are removed, except those that another version shares."""

    version: Version
    files: int
    size_bytes: int


class GarbageReport(Model):
    """Response of `POST /v1/garbage`: the versions whose files were removed, or with `dry_run` would be, and those
    whose files are kept.
    """

    dry_run: bool
    collected: tuple[CollectedVersion, ...]
    kept: tuple[KeptVersion, ...]
    size_bytes: int
