"""Six agents at a table: two werewolves who learn, and four villagers who stay as they are."""
