"""Serving engines: references, hidden states and acceptance asked of vLLM, SGLang and their like over HTTP."""
