"""Extended models for other programs: configurations of transformers, vLLM and SGLang, and GGUF files."""
