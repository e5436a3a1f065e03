"""Tests of the verbs, on the device that ``--device`` names."""
