"""Rollouts: a version is tried on live traffic before it becomes champion. Plan, statistics and state machine are pure.

`plan` is declared beforehand, `headrace_schemas.rules.assignment` assigns units to arms, `records` and `metrics`
describe sessions, `maturity` defines when a unit is read, `evidence` summarises the readings, `state_machine` decides.
See `docs/rollouts.md`.
"""
