"""An agent that solves word problems with a calculator, and learns to be right, brief and in form."""
