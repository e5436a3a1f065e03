"""Tests of aiordma, in folders like those of the package."""
