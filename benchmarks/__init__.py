"""Benchmarks: one command each, one result file each under results/."""
