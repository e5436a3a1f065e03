"""Devices, contexts, ports, addresses and protection domains, and all resources' base classes."""
