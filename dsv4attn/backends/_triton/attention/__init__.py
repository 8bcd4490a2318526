"""The attention kernel, its readers of keys, the kernel that combines splits, and their launcher."""
