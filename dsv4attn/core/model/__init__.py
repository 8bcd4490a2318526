"""Models and weights: geometry of a model and of its layers, released configurations, weights, RoPE tables."""
