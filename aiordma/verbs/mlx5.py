"""The former name of :mod:`aiordma.verbs.experimental.mlx5`."""

from .experimental.mlx5 import *  # noqa: F403
