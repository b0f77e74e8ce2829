"""Recovers traces of killed or interrupted jobs, and joins the recordings of several hosts."""
