"""Casts and products under a recipe, for each backend. Kernels know numbers and a `GemmContext`, but no module."""
