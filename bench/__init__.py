"""Comparisons with what people would use instead, measured beside each other in one run.

python -m bench cost
python -m bench echo
python -m bench many
"""
