"""The oracle: DeepSeek-V4 attention, and the layer around it, in float64 numpy."""
