"""The data path of a connection, compiled: memory, work queues, one-sided work and messages."""
