"""Triton kernels and launchers that backends share; this package registers no backend.

`attention`, `cache`, `index_ops` and `projection` hold kernels and their launchers. `launching` launches and warms up
kernels, and `compiling` cross-compiles them. `support` answers what Triton can do on a device; it imports neither torch
nor Triton.
"""
