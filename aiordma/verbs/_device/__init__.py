"""Devices, contexts, ports and addresses, protection domains; what resources have in common."""
