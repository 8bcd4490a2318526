"""Selection of entries by their scores."""
