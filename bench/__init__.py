"""What aiordma reaches, measured beside what people would use instead, in one run of the machine.

    python -m bench all         everything, into RESULTS.md (a few minutes; --quick: one)
    python -m bench latency     one comparison, printed (styles: those of programs)
    python -m bench peers       installs ucxx and nixl, which are measured where they are
    python -m bench softroce    perftest on SoftRoCE, in the virtual machine, into RESULTS.md
    python -m bench roce        RoCE v2 beside UDP, in network namespaces, into RESULTS.md
    python -m bench render      RESULTS.md again, from results.json
    python -m bench instructions    how many an operation takes: a check, see there
    python -m bench cost        memory and CPU beside the traffic

A comparison (in messages.py, imports.py ...) says what is measured and what is to be reached;
lanes.py has all take turns; contender.py starts their processes, worker.py is what they do in
Python and verbs.c in C.  `aiordma.perf` measures aiordma; over_*.py are the others, in Python.
results.py and plots.py show what came out, and measure nothing; notes.toml says why what is not
reached is not.
"""
