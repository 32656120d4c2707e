"""In the place of vLLM, where it is not installed: Trinity-RFT 0.6.0 imports these names before it knows that an
external model needs none of what is behind them."""
