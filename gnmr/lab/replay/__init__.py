"""The controller over recorded norms: what it would have chosen, without training."""
