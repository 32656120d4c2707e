"""Web console: sessions, training, rollouts and dead letters, with forms for feedback and decisions."""
