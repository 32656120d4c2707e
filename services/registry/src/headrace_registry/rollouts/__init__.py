"""Rollouts: a version is tried on live traffic before it becomes champion. These modules are pure.

`plan` is declared beforehand, `headrace_schemas.rules.assignment` assigns units to arms, `metrics` describes sessions,
`maturity` defines when a unit is read, `evidence` summarises the readings, `state_machine` decides. `estimate` and
`findings` evaluate the answers of a shadow. See `docs/rollouts.md`.
"""
