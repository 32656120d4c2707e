"""Rollouts: a version serves a share of live traffic before it becomes champion. These modules are pure functions.

`plan` contains the rules, which are fixed before a rollout begins. `headrace_schemas.rules.assignment` assigns units to
arms. `metrics` computes metrics of sessions, `evidence` tests them, and `state_machine` decides. `estimate` and
`findings` evaluate the answers of a shadow. See `docs/rollouts.md`.
"""
