"""Vendor-specific queue pair types: SRD on EFA devices, and DC on mlx5 devices.

These modules may change. They have been tested against the vendors' headers and simulated
libraries, but not on hardware. See :mod:`.efa` and :mod:`.mlx5`.
"""
