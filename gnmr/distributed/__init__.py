"""Several processes that train one model: what they share of a step, and what wraps a model for them."""
