"""Queue pairs of single vendors: SRD on EFA, DC on mlx5. Never run on hardware.

They are checked against the vendors' headers and against models of their libraries alone, and may
change. :mod:`.efa` and :mod:`.mlx5` say what they have.
"""
