"""Tests in which SGLang's engine serves requests on a GPU, see conftest.py."""
