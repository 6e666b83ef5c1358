"""The reproduction of the paper: its figures as data, its tables with our runs in them, its theorems as numbers."""
