"""Caches: layouts, records, the caches of a layer, which records a token attends to, and conversion."""
