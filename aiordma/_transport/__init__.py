"""The parts of a connection, one job each; `aiordma.transport` is the face of them all."""
