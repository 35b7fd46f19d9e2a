"""A plan as one page to look at: what is said of it, and the file that shows it."""

from pase.report.document import SCHEMA_VERSION, NamedPlan, report_document
from pase.report.page import render
from pase.report.sweep import Sweep, device_numbers, sweep

__all__ = ["SCHEMA_VERSION", "NamedPlan", "Sweep", "device_numbers", "render", "report_document", "sweep"]
