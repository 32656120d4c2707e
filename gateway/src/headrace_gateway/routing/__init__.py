"""Selection of the version and the replica for a call, and the relay of its answer from this replica."""
