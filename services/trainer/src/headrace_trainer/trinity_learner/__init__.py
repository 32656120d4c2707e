"""The back end `trinity`: Trinity-RFT takes the steps, in its own processes and its own environment."""
