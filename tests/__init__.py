"""The tests; they mirror the package, room by room."""
