"""Tests of the connection manager on the device given by ``--device``."""
