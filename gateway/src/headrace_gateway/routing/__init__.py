"""Selection of the version and the replica for a call, and the stream from this replica."""
