"""The model: Llama in pipeline stages, and its FLOPs."""
