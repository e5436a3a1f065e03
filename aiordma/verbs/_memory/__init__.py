"""Memory regions, memory windows, and the memory that can be registered."""
