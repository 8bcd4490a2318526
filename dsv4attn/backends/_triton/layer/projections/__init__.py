"""Projections of a layer, and the norms between them."""
