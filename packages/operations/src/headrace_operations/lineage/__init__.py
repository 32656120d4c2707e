"""Queries from a version to the sessions and rewards that it was trained on, and from a session to its versions.

All answers come from topics alone: the trainer's report of each save (checkpoint) and the experiences that the reports
name. `versions` and `sessions` contain the two queries.
"""
