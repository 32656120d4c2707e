"""The collector: assembles trajectories from turns."""
