"""Queue pairs, shared receive queues, and the work that is posted to them."""
