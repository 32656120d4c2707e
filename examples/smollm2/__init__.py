"""The mail agent on SmolLM2-135M-Instruct: a pretrained model learns to answer with two facts of a mail."""
