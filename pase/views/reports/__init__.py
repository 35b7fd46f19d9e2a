"""A plan as one page to look at: what is said of it, and the file that shows it."""

from pase.views.reports.document import SCHEMA_VERSION, NamedPlan, render, report, report_document
from pase.views.reports.sweep import Sweep, device_numbers, sweep

__all__ = ["SCHEMA_VERSION", "NamedPlan", "Sweep", "device_numbers", "render", "report", "report_document", "sweep"]
