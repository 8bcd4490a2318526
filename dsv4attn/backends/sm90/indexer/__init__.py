"""Scores of index keys, as a matrix."""
