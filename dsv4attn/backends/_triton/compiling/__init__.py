"""Cross-compiling kernels, and the resources that they need."""
