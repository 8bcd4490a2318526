"""The compressor: states of tokens, entries of windows, and latents of DeepSeek-V4.1."""
