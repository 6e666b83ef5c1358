"""The experiment runner: commands, config, data, models, training, rivals, views of a run, and the report."""
