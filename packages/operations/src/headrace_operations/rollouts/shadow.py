"""What the shadow of a rollout has found, in lines."""

from __future__ import annotations

from headrace_schemas.rollout_api import RolloutState


def lines(rollout: RolloutState) -> list[str]:
    """Empty for a rollout without one."""
    if not rollout.shadow_units:
        return []
    found = rollout.shadow
    if found is None:
        read = rollout.statistics.get("shadow_units", 0)
        return [f"shadow  {read:g} of {rollout.shadow_units} prompts read"]
    said = [
        f"shadow  {found.read} of {found.prompts} prompts answered by both, {found.pairs} pairs with judgements, "
        f"{found.spoke} with a word of their user, {found.tokens} tokens"
    ]
    if found.judged is not None:
        said.append(f"        judges: {found.judged:+.3f}, uncorrected")
    if found.refused is not None:
        said.append(f"        users: nothing said, {found.refused}")
    elif found.difference is not None:
        ends = f"[{found.lower or 0.0:+.3f}, {found.upper or 0.0:+.3f}]"
        counts = f"{found.spoke} answers count as {found.effective:.0f}"
        said.append(f"        users: {found.difference:+.3f} in {ends}, {counts}")
    said += [
        f"        {number} ended otherwise, {how.replace('_', ' ')}" for how, number in sorted(found.ended.items())
    ]
    said += [f"        {number} left out, {why}" for why, number in sorted(found.left_out.items())]
    return said
