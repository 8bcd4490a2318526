"""What people run: the command line, measurements, and the replay of request traces."""
