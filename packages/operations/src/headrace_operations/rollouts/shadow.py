"""Summary lines of a rollout's shadow evaluation."""

from __future__ import annotations

from headrace_schemas.http.rollout_api import RolloutState


def lines(rollout: RolloutState) -> list[str]:
    """Return the summary; empty for a rollout without a shadow."""
    if not rollout.shadow_units:
        return []
    report = rollout.shadow
    if report is None:
        read = rollout.statistics.get("shadow_units", 0)
        return [f"shadow  {read:g} of {rollout.shadow_units} prompts read"]
    summary = [
        f"shadow  {report.read} of {report.prompts} prompts answered by both versions, {report.pairs} judged pairs, "
        f"{report.spoke} with user feedback, {report.tokens} tokens"
    ]
    if report.judged is not None:
        summary.append(f"        judges: {report.judged:+.3f}, uncorrected")
    if report.refused is not None:
        summary.append(f"        users: no estimate, {report.refused}")
    elif report.difference is not None:
        ends = f"[{report.lower or 0.0:+.3f}, {report.upper or 0.0:+.3f}]"
        counts = f"{report.spoke} answers count as {report.effective:.0f}"
        summary.append(f"        users: {report.difference:+.3f} in {ends}, {counts}")
    summary += [
        f"        {number} ended otherwise, {how.replace('_', ' ')}" for how, number in sorted(report.ended.items())
    ]
    summary += [f"        {number} left out, {why}" for why, number in sorted(report.left_out.items())]
    return summary
