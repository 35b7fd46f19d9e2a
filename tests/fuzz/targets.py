"""All targets, by the files that they read."""

from tests.fuzz import arrays, documents

TARGETS = (*documents.TARGETS, *arrays.TARGETS)
