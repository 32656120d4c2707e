"""Pure rules that several services must apply alike."""
