"""Runtime stability control for low-precision language model training."""

__version__ = "0.1.0"
