"""What an error of low precision costs: errors of a path, and prices of GEMMs."""
