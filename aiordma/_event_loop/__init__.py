"""The event loop side: file descriptors, timers, affinity and shutdown."""
