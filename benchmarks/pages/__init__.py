"""The pages of docs/results that come from benchmarks/results, one file each; tables.py writes them."""
