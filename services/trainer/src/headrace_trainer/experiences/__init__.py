"""State of the experiences that the lineage has read: trained, waiting, dropped."""
