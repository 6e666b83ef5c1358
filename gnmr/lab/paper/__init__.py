"""The reproduction of the paper: its published figures as data (published.yaml), and theorem 1 as numbers."""
