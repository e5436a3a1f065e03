"""The part of vLLM's interface that the tier uses, for tests without vLLM.

`test_vllm.py` compares it with vLLM if it is installed.
"""

__version__ = "0.32.0"
