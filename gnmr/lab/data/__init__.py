"""Corpora -> tokens -> sequences. Importing this package imports neither torch nor datasets.

`tokens.prepare` and `tokens.prepare_packed` create a `cache.TokenCorpus`, which `sequences.TrainSequences` and
`packing.PackedSequences` read.
"""
