"""Benchmarks that compare aiordma with its alternatives in one run on one machine.

    python -m bench all         run every comparison and write RESULTS.md (--quick: 3 short turns)
    python -m bench latency     run one comparison and print it (styles: ways to write a program)
    python -m bench peers       install ucxx and nixl, which are measured if they are installed
    python -m bench softroce    run perftest on SoftRoCE in the virtual machine
    python -m bench roce        compare RoCE v2 with UDP in network namespaces
    python -m bench render      write RESULTS.md from results.json without measuring
    python -m bench instructions    count the instructions of an operation; see instructions.py
    python -m bench cost        measure the memory and CPU time that connections use

Each comparison has a module, such as messages.py or imports.py, which defines its measurements and
goals. lanes.py runs the contenders of a comparison in turns. contender.py starts the
processes of a contender: worker.py if it is written in Python, and verbs.c if it is written in C.
aiordma itself is measured by `aiordma.perf`, and the other libraries by over_*.py. results.py and
plots.py render the results. notes.toml contains the reasons for missed goals.
"""
