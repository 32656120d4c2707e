"""The shadow: a candidate answers prompts of real sessions anew, unseen by their users, before it gets any of them.

Pure: `overlap`, `calibration` and `estimate` say what the answers show, `expectations` what they foretell
of a canary's sessions, `recording` what the users' own sessions did. The others carry it out: `sampling` takes prompts
from the traffic, `runner` has them answered (`rerun` is one of them, `asking` and `tool_program` whom it talks to),
`prompts` is what the database keeps, `closing` the end. See `docs/shadow.md`.
"""
