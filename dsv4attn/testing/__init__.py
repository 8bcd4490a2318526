"""What a backend author needs to prove a backend right: an independent oracle and the checks built on it."""
