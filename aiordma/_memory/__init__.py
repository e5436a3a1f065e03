"""Waiting for pool memory, and caching registrations."""
