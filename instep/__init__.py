"""instep: post-train language models on the machine you own; one training step on three engines."""

__version__ = "0.1.0"
