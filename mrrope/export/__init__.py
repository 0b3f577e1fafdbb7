"""Exports of extended models: configurations of transformers, vLLM and SGLang, and GGUF files."""
