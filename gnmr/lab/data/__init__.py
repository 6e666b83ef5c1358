"""Corpora -> tokens -> blocks. Importing this package costs neither torch nor datasets.

`tokens.prepare` and `packing.prepare_packed` make a `cache.TokenCorpus`; `blocks.TrainBlocks` and
`packing.PackedBlocks` read it.
"""
