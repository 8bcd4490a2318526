"""Parts of the layer around attention: compressor, indexer, selection, hyper-connections."""
