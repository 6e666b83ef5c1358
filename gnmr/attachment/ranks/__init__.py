"""Train one model with several processes: share sums and decisions of a step (`lab/train/wrap.py` wraps the model)."""
