"""Calibration: measure this machine and write the results as a machine file."""
