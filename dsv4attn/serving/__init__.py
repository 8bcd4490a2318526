"""What an engine would bring: a cache manager, an allocator of pages, and a scheduler."""
