"""Tests of whole programs on simulated hosts. `make simulate` runs them with many seeds."""
