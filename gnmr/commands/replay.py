"""`gnmr replay FILE [key=value ...]`."""

from gnmr.replay import main

__all__ = ["main"]
