"""Generators and checks of the pages in docs/."""
