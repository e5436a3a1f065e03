"""Completion channels, completion queues and completions."""
