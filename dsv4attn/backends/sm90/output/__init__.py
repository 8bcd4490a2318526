"""The output projection in fp8."""
