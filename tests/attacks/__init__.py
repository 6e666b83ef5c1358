"""The project attacks itself: kills, damaged files, hostile folders, bad inputs, counted by what became of them."""
