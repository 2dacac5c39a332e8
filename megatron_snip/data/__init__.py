"""Data: tokenizers, Megatron's indexed datasets, sample order and the loader."""
