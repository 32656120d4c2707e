"""Operation of a Headrace: supervisor, queries over topics, replay, offline jobs, evaluation, controls, mirror."""
