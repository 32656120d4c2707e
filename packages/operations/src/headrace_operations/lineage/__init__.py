"""Queries from a version to the sessions and rewards that it was trained on, and from a session to its versions.

All answers come from topics alone: the trainer's reports of each save and the experiences that the reports name.
`contents` folds the reports; `versions` and `sessions` have the two queries.
"""
