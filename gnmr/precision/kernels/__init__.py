"""What casts and multiplies under a recipe, for each backend. Kernels know numbers and a `GemmContext`, no module."""
