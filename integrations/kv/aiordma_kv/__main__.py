"""`python -m aiordma_kv`: the command line."""

from .cli import main

main()
