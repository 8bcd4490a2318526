"""Launching kernels: the launch cache, repeated launches, and warm-up."""
