"""Rules by which scheduler options choose how missing experts are computed.

The rules do not know slots or transfers.
"""
