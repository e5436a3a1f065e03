"""Devices, contexts, ports, addresses and protection domains, and the base of all resources."""
