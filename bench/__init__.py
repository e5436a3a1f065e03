"""Benchmarks that compare aiordma with its alternatives in one run on one machine.

    python -m bench all         run every comparison and write RESULTS.md (--quick: 3 short turns)
    python -m bench latency     run one comparison and print it (styles: ways to write a program)
    python -m bench peers       install ucxx and nixl, which are measured if they are installed
    python -m bench softroce    run perftest on SoftRoCE in the virtual machine
    python -m bench roce        compare RoCE v2 with UDP in network namespaces
    python -m bench render      write RESULTS.md from results.json without measuring
    python -m bench instructions    count the instructions of an operation; see instructions.py
    python -m bench cost        measure the memory and CPU time that connections use

Each comparison has a module (messages.py, imports.py ...) that defines what is measured and the
goals. lanes.py runs the contenders in turns. contender.py starts their processes, worker.py is the
process of a contender in Python, and verbs.c the one in C. `aiordma.perf` measures aiordma itself,
and over_*.py the other libraries. results.py and plots.py render the results, and notes.toml
explains why a goal was missed.
"""
