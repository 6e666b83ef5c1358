"""Deliberate faults in the low path of chosen units."""
