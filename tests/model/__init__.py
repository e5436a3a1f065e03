"""Models of the message path's rules in pure Python, and their tests.

The tests of the compiled classes (tests/datapath) drive a class and its model side by side.
"""
