"""A game of six agents: two werewolves that are trained, and four villagers that are not."""
