"""A gate's program that plays on several machines: copies of the user's program on a Ray cluster, and one that deals
plays to them. Only this package imports ray, and only in the process that `registry.gate.ray.workers` starts."""
