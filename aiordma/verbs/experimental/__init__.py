"""Queue pair types that only one vendor supports: SRD on EFA devices, and DC on mlx5 devices.

These modules have not been tested on hardware, only against the vendors' headers and simulated
libraries. They may change. See :mod:`.efa` and :mod:`.mlx5`.
"""
