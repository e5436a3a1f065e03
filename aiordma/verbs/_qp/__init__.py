"""Queue pairs, shared receive queues, and the work posted to them."""
