"""Memory regions and windows, and the memory that can be registered."""
