"""Views of the records while a run goes on (terminal, W&B), and finding runs."""
