"""The experiment runner: it uses the rooms below by their public names."""
