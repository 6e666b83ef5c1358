"""Faults on purpose, in the low path of chosen units."""
