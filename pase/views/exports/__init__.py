"""Exports: a plan written in formats that other programs read."""

from pase.views.exports.registry import FORMATS, Exported, ExportOptions, Format, export

__all__ = ["FORMATS", "ExportOptions", "Exported", "Format", "export"]
