"""What to keep in 16 bits: plan.json, the choice of its pins, and the same choice written for other libraries."""
