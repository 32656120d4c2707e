"""Controls: the same training with rewards that must teach nothing, or something else. See docs/controls.md.

A score that rises says that training did something. Whether it was the reward that did it, only a run can say in which
the reward says nothing: what learns there as well is luck, drift, or a leak.
"""
