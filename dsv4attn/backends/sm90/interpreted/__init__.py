"""Twins of the Gluon kernels for Triton's interpreter, which runs no Gluon: same names, arguments and results."""
