"""Waiting for pool memory, and cached registrations."""
