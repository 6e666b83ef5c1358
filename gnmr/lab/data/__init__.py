"""Corpora -> tokens -> sequences. Importing this package costs neither torch nor datasets.

`tokens.prepare` and `packing.prepare_packed` make a `cache.TokenCorpus`; `sequences.TrainSequences` and
`packing.PackedSequences` read it.
"""
