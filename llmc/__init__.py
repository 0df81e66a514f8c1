"""GPT-2 training, planned to the byte: layers with explicit forward and backward, and llm.c's files and flags."""

__version__ = "0.1.0"
