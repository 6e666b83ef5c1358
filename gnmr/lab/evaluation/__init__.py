"""Models that `gnmr diagnose` and `gnmr audit` load (`subjects`, `blocks`), and `scores` of runs with lm-eval."""
