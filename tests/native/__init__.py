"""Tests of the interface to C."""
