"""The compiled part of the package; everything else is in pyproject.toml.

cffi sets the limited API for the extension by itself; the wheel's abi3 tag is the bdist_wheel
setting in pyproject.toml.
"""

from setuptools import setup

setup(cffi_modules=["aiordma/_native/build.py:ffibuilder"])
