"""Triton that backends share; nothing in here registers a backend.

`attention`, `cache` and `index_ops` hold kernels and what launches them, `projection` the output's. `launching` goes from
arguments to a compiled kernel, `compiling` compiles for devices that are not here. `support` says what Triton can do on
a device, and imports neither torch nor Triton.
"""
