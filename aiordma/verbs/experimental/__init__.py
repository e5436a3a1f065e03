"""Queue pairs that only one vendor supports: SRD on EFA, DC on mlx5. Never run on hardware.

They are tested only against the vendors' headers and models of their libraries, and may change. See
:mod:`.efa` and :mod:`.mlx5`.
"""
