"""State transitions of models and versions. They run in the caller's transaction and collect the events to publish."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict

from sqlalchemy import delete, func, insert, select, update

from headrace_registry.storage import store
from headrace_registry.storage.records import (
    CHAMPION_IS_ANCHOR,
    AnchorState,
    ModelRecord,
    Request,
    State,
    TrialResult,
    VersionRecord,
)
from headrace_registry.storage.tables import CHAMPIONS, EVALUATIONS, MODELS, VERDICTS, VERSION_FILES, VERSIONS
from headrace_registry.versions import routing, state_changes
from headrace_registry.versions.state_changes import StateChanges
from headrace_runtime.clock import epoch_ms
from headrace_runtime.storage.tables import upsert
from headrace_schemas import Checkpoint, Event, RolloutStep
from headrace_schemas.values.blobs import Manifest


class Transition(StateChanges):
    """State transitions of models and versions, such as promotion and rejection, within one transaction.

    Call `finish` last. It returns the events to publish, including new routings of changed models.
    """

    async def finish(self) -> list[Event]:
        """End the rollouts that the changes contradict, compute new routings, and return all events to publish after
        the commit."""
        for model in sorted(self._changed_models):
            await state_changes.end_stale_rollouts(self, model)
            self.events += await routing.publish(self.tx, self.now, model)
        self._changed_models.clear()
        return self.events

    async def register(
        self,
        checkpoint: Checkpoint,
        manifest: Manifest | None,
        problem: str | None,
        *,
        trained: bool = True,
        label: str | None = None,
    ) -> None:
        """Register a version, unless it is already registered.

        Args:
            problem: reason why the version must be rejected at once; None for a valid version.
        """
        if await store.load_version(self.tx, checkpoint.version) is not None:
            return
        await upsert(self.tx, MODELS, {"model": checkpoint.model}, {"revision": -1}, update=False)
        state: State = "rejected" if problem else "registered"
        parent = await store.load_version(self.tx, checkpoint.parent) if checkpoint.parent and not problem else None
        barred = parent is not None and parent.state == "withdrawn"
        state = "withdrawn" if barred else state
        values = {
            "version": checkpoint.version,
            "model": checkpoint.model,
            "lineage": checkpoint.lineage,
            "step": checkpoint.step,
            "parent": checkpoint.parent,
            "base": manifest.base if manifest else None,
            "manifest": checkpoint.manifest.model_dump_json(),
            "tokenizer_sha256": manifest.tokenizer_sha256 if manifest else "",
            "template_sha256": manifest.template_sha256 if manifest else "",
            "state": state,
            "request": "",
            "trained": trained,
            "label": label,
            "registered_ms": epoch_ms(self.now),
            "changed_ms": epoch_ms(self.now),
        }
        await self.tx.execute(insert(VERSIONS).values(values))
        if manifest is not None:
            files = json.dumps(sorted({file.blob.sha256 for file in manifest.files}))
            key = {"version": checkpoint.version}
            await upsert(self.tx, VERSION_FILES, key, {"model": checkpoint.model, "files": files})
        if problem:
            await self.record_decision(checkpoint.model, checkpoint.version, "rejected", reason=problem)
            return
        await self.record_decision(checkpoint.model, checkpoint.version, "registered", previous=checkpoint.parent)
        if parent is not None and barred:
            model = await store.load_model(self.tx, checkpoint.model)
            champion = model.champion if model else None
            reason = f"it descends from {parent.version}, which is withdrawn"
            await self.record_decision(checkpoint.model, checkpoint.version, "withdrawn", reason, previous=champion)
            self.mark_changed(checkpoint.model)

    async def adopt(self, model: ModelRecord, version: str, skipped: tuple[str, ...]) -> None:
        """Make `version` the candidate of the model, and set the state of the `skipped` versions."""
        for name in skipped:
            await self.set_state(name, "skipped")
            await self.record_decision(
                model.model, name, "skipped", reason=f"{version} is newer", previous=model.champion
            )
        await self.set_state(version, "probing")
        await self.set_roles(model, candidate=version)

    async def mark_probed(self, model: ModelRecord, version: str, statistics: Mapping[str, float]) -> None:
        """Record that the candidate has passed its probe on each live replica."""
        await self.set_state(version, "evaluating")
        await self.record_decision(model.model, version, "probed", statistics=statistics, previous=model.champion)

    async def record_audit(
        self, version: VersionRecord, gate_sha256: str, scores: Mapping[str, float], statistics: Mapping[str, float]
    ) -> None:
        """Store the result of a version's audit. It replaces earlier scores of the version."""
        values = {"gate_sha256": gate_sha256, "scores": json.dumps(scores), "at_ms": epoch_ms(self.now)}
        await upsert(self.tx, EVALUATIONS, {"version": version.version}, values)
        await self.record_decision(version.model, version.version, "evaluated", statistics=statistics)

    async def begin_trial(self, model: ModelRecord) -> int:
        """Return the number of the next trial against the model's anchor. The number is used up even if the trial
        fails."""
        await self.tx.execute(update(MODELS).where(MODELS.c.model == model.model).values(trials=model.trials + 1))
        return model.trials + 1

    async def record_trial_result(self, version: str, gate_sha256: str, result: TrialResult) -> None:
        """Store the result of a trial. `promote` and `reject` delete it, so that it is used only once."""
        fields = asdict(result)
        fields["standing"] = fields.pop("anchor_state")  # the name in the database
        values = {"gate_sha256": gate_sha256, "verdict": json.dumps(fields), "at_ms": epoch_ms(self.now)}
        await upsert(self.tx, VERDICTS, {"version": version}, values)

    async def promote(
        self,
        model: ModelRecord,
        version: str,
        reason: str,
        statistics: Mapping[str, float],
        anchor_state: AnchorState = CHAMPION_IS_ANCHOR,
        step: RolloutStep | None = None,
    ) -> None:
        """Make a version the champion. The former champion gets the role `previous`."""
        await self.delete_trial_result(version)
        await self.set_state(version, "promoted", request="", replaced=model.champion, rollout=None)
        reign = {"model": model.model, "version": version, "at_ms": epoch_ms(self.now)}
        await self.tx.execute(insert(CHAMPIONS).values(reign))
        candidate = None if model.candidate == version else model.candidate
        await self.set_roles(
            model, champion=version, previous=model.champion, candidate=candidate, **asdict(anchor_state)
        )
        await self.record_decision(model.model, version, "promoted", reason, statistics, model.champion, step)

    async def reject(
        self,
        model: ModelRecord,
        version: str,
        reason: str,
        statistics: Mapping[str, float],
        anchor_state: AnchorState | None = None,
    ) -> None:
        """Record that the gate has rejected a version, so that it serves no traffic. If it has the role `previous`, it
        keeps that role."""
        await self.delete_trial_result(version)
        if anchor_state is not None:
            await self.set_roles(model, **asdict(anchor_state))
        state: State = "promoted" if version == model.previous else "rejected"
        await self.set_state(version, state, request="")
        if version == model.candidate:
            await self.set_roles(model, candidate=None)
        await self.record_decision(model.model, version, "rejected", reason, statistics, model.champion)

    async def roll_back(self, model: ModelRecord, reason: str) -> None:
        """Make the version with the role `previous` the champion again, and withdraw the present champion with its
        descendants.

        The role `previous` is given to the latest earlier champion that may be served.
        """
        assert model.champion
        assert model.previous
        await self.set_state(model.champion, "withdrawn", request="")
        await self.set_state(model.previous, "promoted", request="")
        await self.record_decision(model.model, model.champion, "rolled_back", reason, previous=model.previous)
        barred = await self._withdraw_descendants(model.champion, model.previous)
        await self._forget_champions_after(model.model, model.previous)
        previous = await store.rollback_target(self.tx, model.model, model.previous)
        candidate = None if model.candidate in {model.previous, *barred} else model.candidate
        withdrawn = {model.champion, *barred}
        pinned = None if model.pinned in withdrawn else model.pinned
        stays = model.anchor not in {None, model.previous, *withdrawn}
        anchor_state = AnchorState(model.anchor, model.trials) if stays else CHAMPION_IS_ANCHOR
        await self.set_roles(
            model,
            champion=model.previous,
            previous=previous,
            candidate=candidate,
            pinned=pinned,
            **asdict(anchor_state),
        )

    async def withdraw(
        self,
        model: ModelRecord,
        version: str,
        reason: str,
        statistics: Mapping[str, float] | None = None,
        step: RolloutStep | None = None,
    ) -> None:
        """Withdraw a version, which must not be the champion, and its descendants, so that they serve no traffic.

        If the champion is a descendant, then the champion, its ancestors and their children are not withdrawn.
        """
        assert version != model.champion
        await self.set_state(version, "withdrawn", request="")
        await self.record_decision(model.model, version, "withdrawn", reason, statistics, model.champion, step)
        withdrawn = {version, *await self._withdraw_descendants(version, model.champion)}
        roles: dict[str, str | None] = {}
        roles |= {role: None for role in ("candidate", "pinned") if getattr(model, role) in withdrawn}
        if model.previous in withdrawn:
            roles["previous"] = await store.rollback_target(self.tx, model.model, model.champion)
        anchor_state = asdict(CHAMPION_IS_ANCHOR) if model.anchor in withdrawn else {}
        await self.set_roles(model, **roles, **anchor_state)

    async def clear_roles(self, model: ModelRecord) -> None:
        """Remove all roles of a model, so that no version serves its traffic any more."""
        if model.candidate:
            await self.set_state(model.candidate, "registered", request="")
        roles = dict.fromkeys(("champion", "previous", "candidate", "pinned"))
        await self.set_roles(model, **roles, **asdict(CHAMPION_IS_ANCHOR))

    async def release(self, model: ModelRecord, version: str) -> None:
        """Make the candidate a waiting version again, without a decision about it."""
        await self.set_state(version, "registered")
        await self.set_roles(model, candidate=None)

    async def pin(self, model: ModelRecord, version: str) -> None:
        """Pin the model to a version, so that no other version can become champion."""
        await self.set_roles(model, pinned=version)

    async def unpin(self, model: ModelRecord) -> None:
        await self.set_roles(model, pinned=None)

    async def pause(self, model: ModelRecord, paused: bool) -> None:
        statement = update(MODELS).where(MODELS.c.model == model.model).values(paused=paused)
        await self.tx.execute(statement)
        self.mark_changed(model.model)

    async def _forget_champions_after(self, model: str, until: str) -> None:
        """Delete, from the history of champions, those after the last time at which the version `until` was
        champion."""
        last_reign = select(func.max(CHAMPIONS.c.id)).where(CHAMPIONS.c.model == model, CHAMPIONS.c.version == until)
        last_id = (await self.tx.execute(last_reign)).scalar_one_or_none()
        if last_id is not None:
            await self.tx.execute(delete(CHAMPIONS).where(CHAMPIONS.c.model == model, CHAMPIONS.c.id > last_id))

    async def _withdraw_descendants(self, version: str, champion: str | None) -> list[str]:
        """Withdraw the descendants of `version`, and return their names.

        The champion, its ancestors and their children are not withdrawn.
        """
        kept_versions = await store.ancestry(self.tx, champion)
        barred: list[str] = []
        generation = [version]
        while generation:  # this ends: a parent is registered before its children, and a version has one parent
            children = [
                version_record
                for version_record in await store.children(self.tx, generation)
                if version_record.version not in kept_versions
            ]
            for child in children:
                if child.state != "withdrawn":
                    await self.set_state(child.version, "withdrawn", request="")
                    reason = f"it descends from {version}, which was withdrawn"
                    await self.record_decision(child.model, child.version, "withdrawn", reason, previous=champion)
            generation = [child.version for child in children if child.version not in barred]
            barred += generation
        return barred

    async def request(self, version: VersionRecord, request: Request, rollout: str | None = None) -> None:
        """Store an operator's request to promote a version, by which it becomes the next candidate."""
        request_values = {"request": request, "rollout": rollout}
        if version.state in ("probing", "evaluating"):
            statement = update(VERSIONS).where(VERSIONS.c.version == version.version).values(request_values)
            await self.tx.execute(statement)
        else:
            await self.set_state(version.version, "registered", **request_values)
        self.mark_changed(version.model)
