"""Tests of rollouts: processes that die within a rollout, and versions whose content differs from their manifest."""
