"""Corpora -> tokens -> sequences. Importing this package imports neither torch nor datasets.

`tokens.prepare` creates a `cache.TokenCorpus`, which `sequences.TrainSequences` and `packing.PackedSequences` read.
"""
