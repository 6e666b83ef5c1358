"""Train one model with several processes: wrap the model, and share sums and decisions of a step."""
