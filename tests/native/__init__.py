"""Tests of the boundary to C."""
