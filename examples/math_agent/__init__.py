"""Agent that solves word problems with a calculator, trained to be right, brief and in the expected form."""
