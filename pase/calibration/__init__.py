"""Calibration: the machine at hand measured through TensorFlow, and written as a machine file."""
