"""What cases and checks are made of: inputs of cases, caches with known bytes, expected values, tolerances."""
