"""Which GEMM runs on which recipe: diagnose a model, solve a plan under a budget, and export it to other libraries."""
