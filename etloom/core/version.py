"""The version of etloom, as written to files and reports."""

__version__ = "0.1.0"
