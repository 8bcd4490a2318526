"""Context parallelism: one sequence over the ranks of a process group, each with a part of the compressed entries."""
