"""Program for the gate that plays on several machines. It runs copies of the user's program on a Ray cluster, and
distributes the plays among them. Only this package imports ray, and only in the process that the registry starts for
`registry.gate.ray.workers`."""
