"""Scores and selection of entries without a matrix of scores: in one launch, and by groups of entries."""
