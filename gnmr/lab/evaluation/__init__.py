"""Models as `gnmr diagnose` and `gnmr audit` load them (`subjects`, `blocks`), and `scores` of runs by lm-eval."""
