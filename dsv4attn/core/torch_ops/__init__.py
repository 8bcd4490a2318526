"""The definition of every op in plain torch, and the default of every backend.

No op reads a tensor value on the host or loops over tokens, so that a graph can capture it; temporaries are cut into
tiles of TILE_BYTES.
"""
