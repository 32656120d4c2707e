"""Cache of verdicts by question, so that a question is not paid for twice."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from datetime import datetime, timedelta

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_judge.tables import VERDICTS
from headrace_judge.verdict import Verdict
from headrace_runtime.clock import epoch_ms
from headrace_runtime.storage.tables import delete_batch, upsert


def question_digest(body: Mapping[str, object], sample: int) -> str:
    """Return the digest of a question: the request (model, rubric, template, run) and the number of the sample."""
    text = json.dumps([body, sample], sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


async def find(tx: AsyncConnection, question: str) -> Verdict | None:
    """Return the cached verdict of a question; None if there is none."""
    row = await tx.scalar(select(VERDICTS.c.verdict).where(VERDICTS.c.question == question))
    return None if row is None else Verdict.model_validate_json(row)


async def store(tx: AsyncConnection, now: datetime, question: str, verdict: Verdict) -> None:
    """Store the verdict of a question."""
    values = {"verdict": verdict.model_dump_json().encode(), "at_ms": epoch_ms(now)}
    await upsert(tx, VERDICTS, {"question": question}, values)


async def prune(tx: AsyncConnection, now: datetime, retention: timedelta) -> bool:
    """Delete some verdicts older than `retention`, and return whether there may be more."""
    return await delete_batch(tx, VERDICTS, VERDICTS.c.at_ms < epoch_ms(now - retention), order=VERDICTS.c.at_ms)
