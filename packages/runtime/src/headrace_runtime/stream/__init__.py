"""Core of the stream services (collector, scorer, judge): it turns records into effects and events, with effects that
happen once."""
