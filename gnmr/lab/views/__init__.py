"""What shows a run while it goes on: the recorder fans rows out to the files, the terminal and W&B."""
