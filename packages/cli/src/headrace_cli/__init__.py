"""The `headrace` command, and the supervisor behind `headrace up`: what operates a Headrace on one machine or many."""
