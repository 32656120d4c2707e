"""From a version to the sessions, rewards and offsets that it was trained on, and from a session to its versions.

Everything comes from topics alone: what the trainer reports with each save, and the experiences that it names.
`contents` folds the reports, `versions` and `sessions` ask, `reading` reads.
"""
