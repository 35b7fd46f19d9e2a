"""The version of PaSE: read by setup.py as text, and by everything that states which version wrote a file."""

__version__ = "0.12.0"
