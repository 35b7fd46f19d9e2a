"""The emitter: descriptions of targets, and the translation of a plan's layers for one; it loads no framework."""
