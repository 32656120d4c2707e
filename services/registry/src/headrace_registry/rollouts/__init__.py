"""Rollouts: a version earns its place on live traffic. Statistics, assignment and the state machine, without any IO.

`plan` is declared beforehand, `assignment` says who gets which version, `records` and `metrics` what a session was
like, `maturity` when it counts, `evidence` what the sessions show, `machine` what follows. See `docs/rollouts.md`.
"""
