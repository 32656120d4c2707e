"""A gate's program that plays on several machines: it runs copies of the user's program on a Ray cluster and
distributes the plays among them. Only this package imports ray, and only in the process that
`registry.gate.ray.workers` starts."""
