"""Triton that backends share; nothing in here registers a backend.

`attention`, `cache`, `index_ops` and `projection` hold kernels and their launchers. `launching` goes from arguments to
a compiled kernel, `compiling` compiles for devices that are not here. `support` says what Triton can do on a device; it
imports neither torch nor Triton.
"""
