"""The emitter: what targets are, and how the layers of a plan are written for one. No framework is loaded for it."""
