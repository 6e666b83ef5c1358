"""Published methods that runs compare with routing: gradient transforms, the optimizer SCALE, compressed gradients."""
