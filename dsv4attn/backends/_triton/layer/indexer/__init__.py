"""The indexer: its queries, and scores of its keys."""
