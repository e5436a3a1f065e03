"""Settings of hypothesis for the pure core."""

from hypothesis import settings

# No deadline: how long an example takes says more about the machine than about the code.
settings.register_profile("core", deadline=None, print_blob=True)
settings.load_profile("core")
