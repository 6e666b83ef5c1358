"""As the package of this name."""
