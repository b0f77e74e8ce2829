"""Starts a job with the recorder in every rank, and finishes the run folder when the job has ended."""
