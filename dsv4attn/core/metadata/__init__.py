"""Metadata of a step: the builder, and the checks of what an engine gives it."""
