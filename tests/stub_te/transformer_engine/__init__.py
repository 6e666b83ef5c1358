"""Stands for Transformer Engine where there is none: its interface on any device, in plain arithmetic."""
