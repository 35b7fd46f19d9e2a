"""Calibration: the machine at hand measured through TensorFlow, and written as a machine file."""

from pase.calibration.measured import CalibrationChoice, MeasuredMachine, calibrate, measured_machine

__all__ = ["CalibrationChoice", "MeasuredMachine", "calibrate", "measured_machine"]
