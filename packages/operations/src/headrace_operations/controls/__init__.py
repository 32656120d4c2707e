"""Control experiments: the same training with shuffled, flipped, random or partial rewards. See docs/controls.md.

A rising score shows that training had an effect. Only a run with rewards without information shows whether the reward
caused it: an effect that remains there is chance, drift or a leak.
"""
