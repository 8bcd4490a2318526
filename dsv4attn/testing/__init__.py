"""The conformance kit: an independent oracle, and cases, checks and pytest classes to prove a backend right."""
