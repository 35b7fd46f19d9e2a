"""Benchmarks of PaSE; each is a module here and a line in __main__."""
