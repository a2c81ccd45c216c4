"""Figures. Each function takes data frames or records and returns a matplotlib figure; none takes a path."""
