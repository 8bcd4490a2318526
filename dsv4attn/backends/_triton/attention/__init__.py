"""The attention kernel: what it computes, how it reads keys, how parts are added up, and its launcher."""
