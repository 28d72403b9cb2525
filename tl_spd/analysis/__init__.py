"""Analyses of a Run: numbers and DataFrames, no plots."""
