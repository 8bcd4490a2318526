"""Attention by Gluon kernels: on pages of records, on gathered bf16 rows, and for decodes of few tokens or heads."""
