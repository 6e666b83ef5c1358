"""Reproduction of the paper: its published figures as data (published.yaml), and theorem 1 in numbers."""
