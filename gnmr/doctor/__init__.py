"""Measure what low precision costs a model, plan what to keep in 16 bits, and export the plan to other libraries."""
