"""Calibration: the machine at hand measured through TensorFlow, and written as a machine file."""

from pase.calibration.measured import MeasuredMachine, measured_machine
from pase.calibration.run import CalibrationChoice, calibrate

__all__ = ["CalibrationChoice", "MeasuredMachine", "calibrate", "measured_machine"]
