"""Memory regions and windows, and what may be registered as one."""
