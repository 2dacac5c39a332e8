"""Data: tokenizers, Megatron's indexed datasets, the order of the samples, the loader."""
