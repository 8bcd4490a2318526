"""Index arithmetic as kernels: dense rows, ragged lists, and what the metadata builder needs."""
