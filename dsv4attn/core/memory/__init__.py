"""Workspace: its arenas, the plan of its size, and the chunks of a prefill that fit into it."""
