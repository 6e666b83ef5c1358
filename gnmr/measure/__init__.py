"""What low precision costs: errors of a path, prices of GEMMs, the KL, and the passes that measure them."""
