"""The reproduction of the paper: its published figures as data, and theorem 1 as numbers."""
