"""Tests of the compiled data path, module by module."""
