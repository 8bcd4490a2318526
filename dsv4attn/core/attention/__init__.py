"""One attention: from `forward_mqa` to the call of a backend."""
