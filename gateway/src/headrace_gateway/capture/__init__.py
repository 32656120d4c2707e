"""Records of calls: transcripts, turns, and the spool of events that were not yet sent to the bus."""
