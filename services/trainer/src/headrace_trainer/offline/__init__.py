"""Training without a bus: a dry run of a replay, and the short trainings of `headrace controls`."""
