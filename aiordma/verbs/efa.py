"""The former name of :mod:`aiordma.verbs.experimental.efa`."""

from .experimental.efa import *  # noqa: F403
