"""The step, the loop, the optimizer and checkpoints."""
