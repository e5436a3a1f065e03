"""Tests of the embedded device."""
