"""Writing keys to caches and gathering them."""
