"""Tests in which vLLM's engine serves requests on a GPU, see conftest.py."""
