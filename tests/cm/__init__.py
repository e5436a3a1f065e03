"""Tests of the connection manager, on the device that ``--device`` names."""
