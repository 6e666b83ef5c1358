"""What low precision costs a model, what to keep in 16 bits, and the same choice written for other libraries."""
