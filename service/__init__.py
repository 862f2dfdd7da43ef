"""kvferry: a sidecar that keeps the KV cache of LLM inference servers beyond GPU memory."""

__version__ = "0.1.0"
