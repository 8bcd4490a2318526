"""A whole layer: projections, compressor, indexer, attention, hyper-connections."""
