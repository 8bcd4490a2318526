"""The contract between core and a backend."""
