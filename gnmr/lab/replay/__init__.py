"""The controller on recorded norms: the decisions it would have made, without training."""
