"""`make test-rollouts`: processes that die in the middle of a rollout, and versions that are not what they say."""
