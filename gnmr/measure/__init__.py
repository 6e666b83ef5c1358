"""Measure the cost of low precision: the errors of a path and the prices of GEMMs."""
