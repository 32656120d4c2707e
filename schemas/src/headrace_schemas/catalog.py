"""What the registry is asked about models that nobody trains, aliases, tags, notes, garbage and the audit log.

Each change has a `why`. Who asks comes from the key and from the header `WHO_HEADER`.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from headrace_schemas.base import AliasName, Model, ModelName, Remark, Text, Timestamp, Version
from headrace_schemas.blobs import BlobRef

WHO_HEADER = "x-headrace-who"
"""Who asks, in the asker's own words. The audit log keeps it beside what the key proves."""
NOTES_MAX = 200
"""Of one version."""


class RegisterRequest(Model):
    """`POST /v1/models/{name}/register`: a version whose files are in the blob store and that nobody trains here.

    A version that is known stays as it is; one that was retired comes back.
    """

    manifest: BlobRef
    label: AliasName | None = None
    """A name for this version alone, such as `v1.0`: it never moves."""
    serve: bool = False
    why: Remark = ""


class ServeRequest(Model):
    """`POST /v1/models/{name}/serve` and `.../unserve`."""

    version: Version
    why: Remark = ""


class AliasMove(Model):
    """What an alias shall name, and what the asker knows it to name now. `version` None removes it."""

    version: Version | None
    expected: Version | None


class AliasesRequest(Model):
    """`POST /v1/models/{name}/aliases`: all moves, or none when one of them is not as expected."""

    moves: dict[AliasName, AliasMove] = Field(min_length=1, max_length=64)
    why: Remark = ""


class RetireRequest(Model):
    """`POST /v1/models/{name}/retire`."""

    version: Version
    why: Remark = ""


class TagsRequest(Model):
    """`POST /v1/models/{name}/tags`."""

    version: Version
    add: tuple[AliasName, ...] = Field(default=(), max_length=64)
    remove: tuple[AliasName, ...] = Field(default=(), max_length=64)
    why: Remark = ""


class NoteRequest(Model):
    """`POST /v1/models/{name}/notes`."""

    version: Version
    text: Annotated[Remark, Field(min_length=1)]


class Note(Model):
    """What somebody wrote about a version."""

    text: str
    who: str
    at: Timestamp


class NoteList(Model):
    """`GET /v1/models/{name}/notes?version=`, the oldest first."""

    object: Text = "list"
    data: tuple[Note, ...]


class AuditEntry(Model):
    """One change that somebody asked for and that was made."""

    number: Annotated[int, Field(ge=1)]
    at: Timestamp
    principal: Text
    """What authentication proves: `internal` for `security.internal_key`, `open` where no key is set."""
    who: str
    """Who the asker said to be; empty when it said nothing."""
    action: Text
    model: ModelName
    version: Version | None = None
    why: str
    detail: str = ""


class AuditList(Model):
    """`GET /v1/audit?model=&before=&limit=`, the newest first."""

    object: Text = "list"
    data: tuple[AuditEntry, ...]


class GarbageRequest(Model):
    """`POST /v1/garbage`. A dry run, unless told otherwise, says what would be removed."""

    dry_run: bool = True
    why: Remark = ""


class Kept(Model):
    """A retired version that stays, and what needs it."""

    version: Version
    needed_by: tuple[str, ...]


class Collected(Model):
    """A retired version whose files are removed. Files that another version has, too, stay."""

    version: Version
    files: int
    size_bytes: int


class GarbageReport(Model):
    """What was removed, or would be."""

    dry_run: bool
    collected: tuple[Collected, ...]
    kept: tuple[Kept, ...]
    size_bytes: int
