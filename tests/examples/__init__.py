"""The examples, run as people run them."""
